"""Fit of a throughput model to measured step times, with optimistic priors for what was not yet seen.

The loss is in `loss`, its minimisation in `solver`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from pollux.goodput.fabric import AllReduce, FabricThroughput, ring_sync_basis, tree_sync_basis
from pollux.goodput.loss import LOWER, UPPER, FitProblem
from pollux.goodput.solver import Minimum, minimise
from pollux.goodput.throughput import FloatArray, PublishedThroughput, SyncBasis, published_sync_basis

__all__ = ["ACROSS_NODES_FACTOR", "FitResult", "Observation", "fit", "fit_fabric"]

Model = TypeVar("Model", PublishedThroughput, FabricThroughput)

ACROSS_NODES_FACTOR = 1.1
_FIRST_OVERLAPS = (1.0, 1.5, 2.5)
_LEAST_GUESS = 0.01
_PERFECT = 1e-3
# Nodes, GPUs, samples, seconds, seconds and weight that a measurement can have; NaN compares false.
_LEAST_USABLE = np.array([1.0, 1.0, 1e-3, 1e-8, 1e-8, 1e-9])
_LARGEST_USABLE = np.array([1e6, 1e6, 1e12, 1e8, 1e8, 1e9])
# Growth is held back in the first guess, as the penalty does in the loss: two GPUs alone must leave it small.
_GROWTH_HELD_BACK = np.array([1.0 + 1e-6, 1.01, 1.0 + 1e-6, 1.01])


@dataclass(frozen=True, slots=True)
class Observation:
    """What was measured on one placement at one local batch: mean seconds of T_grad and of a step with s = 0.

    `weight` is relative; recent measurements may count for more than old ones.
    """

    num_nodes: int
    num_gpus: int
    local_batch: float
    compute_seconds: float
    step_seconds: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class FitResult(Generic[Model]):
    """The outcome of a fit. When `converged` is false it failed, and `parameters` are the previous, if any.

    `reason` is empty after a clean fit; else it says what failed, which rows were left out, or that steps ran
    out.
    """

    parameters: Model | None
    loss: float
    converged: bool
    reason: str
    num_evaluations: int


def fit(
    observations: Sequence[Observation], previous: PublishedThroughput | None = None
) -> FitResult[PublishedThroughput]:
    """Fit the seven published parameters (§4.1): least RMSE(log T_grad) + RMSE(log T_step) + penalties, Eq. (G18).

    Where nothing was seen the model is optimistic, Eq. (G22), so that jobs explore. One distinct local batch:
    αc is half the mean compute time. No placement across nodes: αn and βn at the bound during the fit, and at
    least 1.1 times αr and βr after it. None within a node: αr and βr at the bound. No K > 2 across nodes: βn
    at the bound; none within a node: βr.
    Bad measurements never raise: unusable rows are left out, and a fit that fails keeps `previous`, and both
    are reported.
    """
    return _fit(observations, previous, published_sync_basis, _published)


def fit_fabric(
    observations: Sequence[Observation],
    previous: FabricThroughput | None = None,
    algorithm: AllReduce | None = None,
) -> FitResult[FabricThroughput]:
    """Fit the fabric model with the same loss and priors; without `algorithm`, the one of lower loss."""
    results = [
        _fit(observations, previous, basis, build)
        for name, basis, build in (("ring", ring_sync_basis, _ring), ("tree", tree_sync_basis, _tree))
        if algorithm in (None, name)
    ]
    return min(results, key=lambda result: (not result.converged, result.loss))


def _published(values: Sequence[float]) -> PublishedThroughput:
    return PublishedThroughput(*values)


def _ring(values: Sequence[float]) -> FabricThroughput:
    return FabricThroughput(*values, algorithm="ring")


def _tree(values: Sequence[float]) -> FabricThroughput:
    return FabricThroughput(*values, algorithm="tree")


def _fit(
    observations: Sequence[Observation],
    previous: Model | None,
    basis: SyncBasis,
    build: Callable[[Sequence[float]], Model],
) -> FitResult[Model]:
    rows, ignored = _usable_rows(observations)
    if rows.shape[1] == 0:
        reason = ignored or "no observations"
        return FitResult(previous, math.inf, False, f"{reason}: kept the previous parameters", 0)
    problem = FitProblem(rows[2], basis(rows[0], rows[1]), rows[3], rows[4], rows[5])
    fixed = _fixed_values(problem)
    free = np.isnan(fixed)
    try:
        minimum = _descend(problem, previous, fixed, free)
    except np.linalg.LinAlgError as error:
        reason = f"the fit failed ({error}): kept the previous parameters"
        return FitResult(previous, math.inf, False, reason, problem.evaluations)
    if not math.isfinite(minimum.loss):
        reason = f"the fit stopped at a loss of {minimum.loss}: kept the previous parameters"
        return FitResult(previous, minimum.loss, False, reason, problem.evaluations)
    fitted = np.clip(minimum.parameters, LOWER, UPPER)
    if not problem.basis[0].any():
        fitted[2:4] = np.maximum(fitted[2:4], ACROSS_NODES_FACTOR * fitted[4:6])
    reasons = [ignored, "" if minimum.converged else "out of steps while the loss still fell a little"]
    reason = "; ".join(filter(None, reasons))
    return FitResult(build(fitted.tolist()), minimum.loss, True, reason, problem.evaluations)


def _descend(
    problem: FitProblem,
    previous: PublishedThroughput | FabricThroughput | None,
    fixed: FloatArray,
    free: npt.NDArray[np.bool_],
) -> Minimum:
    """The minimum near the previous parameters; without them, from the best first guess.

    A parameter at its bound starts from the first guess too, since a descent could not leave the bound. The loss
    often has a second valley besides that at γ = 1: if the first search ends there, another tries the other side.
    """
    warm = None if previous is None else np.where(free, np.clip(previous.parameters, LOWER, UPPER), fixed)
    stuck = np.zeros_like(free) if warm is None else _without_slope(warm) & free
    if warm is not None and not stuck.any():
        return minimise(problem, warm, free, near=True)
    guesses = _first_guesses(problem, fixed, free)
    best = min(guesses, key=problem.loss)
    if warm is not None:
        warm = np.where(stuck, best, warm)
        if problem.loss(warm) < problem.loss(best):
            return minimise(problem, warm, free, near=True)
    minimum = minimise(problem, best, free)
    if minimum.parameters[6] <= LOWER[6] and problem.rmse[1] > _PERFECT and free[2:6].any():
        other = minimise(problem, guesses[-1], free)
        return min(minimum, other, key=lambda found: found.loss)
    return minimum


def _usable_rows(observations: Sequence[Observation]) -> tuple[FloatArray, str]:
    """The usable rows as columns of a [6, R] array, and a note on what was left out."""
    table = np.array(
        [
            (row.num_nodes, row.num_gpus, row.local_batch, row.compute_seconds, row.step_seconds, row.weight)
            for row in observations
        ],
        dtype=float,
    ).reshape(-1, 6)
    rows = np.ascontiguousarray(table.T)
    usable = ((table >= _LEAST_USABLE) & (table <= _LARGEST_USABLE)).all(axis=1) & (rows[0] <= rows[1])
    if usable.all():
        return rows, ""
    ignored = len(usable) - int(usable.sum())
    reason = f"left out {ignored} of {len(usable)} rows: not finite, out of range, or more nodes than GPUs"
    return rows[:, usable], reason


def _fixed_values(problem: FitProblem) -> FloatArray:
    """The value of each parameter that the rows do not determine, Eq. (G22); NaN for those to be fitted."""
    fixed = np.full(7, np.nan)
    local_batch = problem.local_batch
    if local_batch.min() == local_batch.max():
        fixed[0] = 0.5 * float(problem.weight @ problem.measured[0])
    fixed[2:6][~problem.basis.any(axis=1)] = LOWER[2]
    return fixed


def _without_slope(parameters: FloatArray) -> npt.NDArray[np.bool_]:
    """Which of the six times are so close to 0 that, with overlap, the loss hardly depends on them."""
    near_bound = parameters <= 2.0 * LOWER
    near_bound[6] = False
    return near_bound


def _first_guesses(problem: FitProblem, fixed: FloatArray, free: npt.NDArray[np.bool_]) -> FloatArray:
    """Guesses by linear least squares on relative errors, Eq. (G21), one row for each degree of overlap."""
    guess = np.where(free, 1.0, fixed)
    _guess_compute(problem, guess, bool(free[0]))
    candidates = np.repeat(guess[None], len(_FIRST_OVERLAPS), axis=0)
    candidates[:, 6] = _FIRST_OVERLAPS
    if free[2:6].any():
        _guess_sync(problem, candidates, free[2:6])
    np.clip(candidates, LOWER, UPPER, out=candidates)
    return candidates


def _guess_compute(problem: FitProblem, guess: FloatArray, both: bool) -> None:
    """αc and βc with the least mean of ((αc + βc·m)/T_grad − 1)², Eq. (G21), kept positive."""
    weight, inverse = problem.weight, 1.0 / problem.measured[0]
    if not both:
        guess[1] = float(weight @ problem.measured[0] - guess[0]) / float(problem.local_batch[0])
        return
    columns = np.array([inverse, problem.local_batch * inverse])
    weighted = columns * weight
    (one, cross), (_, two) = (weighted @ columns.T).tolist()
    right_one, right_two = weighted.sum(axis=1).tolist()
    determinant = one * two - cross * cross
    least_one, least_two = _LEAST_GUESS * right_one / one, _LEAST_GUESS * right_two / two
    alpha = beta = 0.0
    if determinant > 1e-12 * one * two:
        alpha = (right_one * two - right_two * cross) / determinant
        beta = (one * right_two - cross * right_one) / determinant
    if alpha < least_one:
        alpha = least_one
        beta = (right_two - cross * alpha) / two
    if beta < least_two:
        beta = least_two
        alpha = max((right_one - cross * beta) / one, least_one)
    guess[0], guess[1] = alpha, beta


def _guess_sync(problem: FitProblem, guesses: FloatArray, free: npt.NDArray[np.bool_]) -> None:
    """The four parameters of T_sync, by least squares on what γ leaves of the step time, Eq. (G21), kept positive."""
    overlap = guesses[:, 6, None]
    step = problem.measured[1]
    compute = np.minimum(guesses[0, 0] + guesses[0, 1] * problem.local_batch, step)
    exposed = np.maximum(1.0 - (compute / step) ** overlap, 0.05**overlap)
    columns = problem.basis / (step * exposed ** (1.0 / overlap))[:, None]
    weighted = columns * problem.weight
    normal = weighted @ columns.transpose(0, 2, 1)
    right = weighted.sum(axis=2)
    diagonal = np.where(free, np.einsum("gii->gi", normal), 1.0)
    normal[:, range(4), range(4)] = diagonal * _GROWTH_HELD_BACK
    values = np.linalg.solve(normal, right[..., None])[..., 0]
    np.maximum(values, _LEAST_GUESS * right / diagonal, out=values)
    guesses[:, 2:6] = np.where(free, values, guesses[:, 2:6])
