"""What the tests of the fit share: the published way of fitting, as a yardstick."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.optimize import minimize

from pollux.goodput import Observation
from pollux.goodput.loss import LOWER, UPPER, FitProblem
from pollux.goodput.throughput import FloatArray, published_sync_basis


def _lbfgs_loss(rows: Sequence[Observation]) -> float:
    nodes, gpus, local_batch, compute, step, weight = np.array(
        [
            (row.num_nodes, row.num_gpus, row.local_batch, row.compute_seconds, row.step_seconds, row.weight)
            for row in rows
        ]
    ).T
    values = np.array([0.1, 0.01] * 3 + [1.001])
    free = np.ones(7, dtype=bool)
    unseen = (
        ([2, 3], not (nodes > 1).any()),
        ([4, 5], not ((nodes == 1) & (gpus > 1)).any()),
        ([3, 5], not (gpus > 2).any()),
    )
    for parameters, is_unseen in unseen:
        if is_unseen:
            values[parameters], free[parameters] = LOWER[0], False
    if len(set(local_batch)) == 1:
        values[0], free[0] = np.average(compute, weights=weight) / 2, False
    problem = FitProblem(local_batch, published_sync_basis(nodes, gpus), compute, step, weight)

    def objective(point: FloatArray) -> tuple[float, FloatArray]:
        parameters = values.copy()
        parameters[free] = point
        loss = problem.loss(parameters)
        gradient = problem.derivatives(parameters)[0]
        gradient[:6] /= parameters[:6]
        return loss, gradient[free]

    bounds = list(zip(LOWER[free], UPPER[free], strict=True))
    result = minimize(
        objective,
        values[free],
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 500, "maxfun": 1000, "ftol": 1e-12, "gtol": 1e-9},
    )
    return float(result.fun)


@pytest.fixture(scope="session")
def lbfgs_loss() -> Callable[[Sequence[Observation]], float]:
    """The loss L-BFGS-B attains from the published start, with the published priors, to tight tolerance."""
    return _lbfgs_loss
