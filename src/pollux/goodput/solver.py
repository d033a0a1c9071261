"""Minimises the loss of a throughput fit by damped Gauss-Newton steps inside bounds.

A general L-BFGS-B needs eight times as long on twenty rows, and much longer where its linear algebra competes
for cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pollux.goodput.loss import LOWER, NUM_PARAMETERS, UPPER, FitProblem, to_coordinates, to_parameters
from pollux.goodput.throughput import FloatArray

__all__ = ["Minimum", "minimise"]

# Of each stage: how much the kink of a perfect fit is smoothed, δ of Eq. (G19), and the relative decrease that ends it.
_STAGES = ((1e-2, 1e-4), (1e-3, 1e-4), (1e-5, 1e-6))
_LAST = len(_STAGES) - 1
_MAX_STEPS = 100
_MAX_TRIALS = 10
_FIRST_DAMPING = 1e-3
_LEAST_DAMPING = 1e-6
_LEAST_CURVATURE = 1e-6
_LONGEST_STEP = 3.0
_DIAGONAL = slice(None, None, NUM_PARAMETERS + 1)


@dataclass(frozen=True, slots=True)
class Minimum:
    """Where the search ended; not `converged` when it ran out of steps while the loss still fell."""

    parameters: FloatArray
    loss: float
    converged: bool


class _Descent:
    """Levenberg-Marquardt in the coordinates of the loss; parameters that are not free keep their value."""

    def __init__(self, problem: FitProblem, start: FloatArray, free: npt.NDArray[np.bool_]) -> None:
        self.problem = problem
        self.coordinates = to_coordinates(start)
        self.parameters = start
        fixed = ~free
        self.lower = np.where(fixed, self.coordinates, to_coordinates(LOWER))
        self.upper = np.where(fixed, self.coordinates, to_coordinates(UPPER))
        self.damping = _FIRST_DAMPING

    def run(self, smoothing: float, tolerance: float) -> bool:
        """Descend until a step gains less than `tolerance` of the loss; false when out of steps."""
        loss = self.problem.loss(self.parameters, smoothing)
        for _ in range(_MAX_STEPS):
            lowered = self._step(loss, smoothing)
            if lowered is None or loss - lowered <= tolerance * loss:
                return True
            loss = lowered
        return False

    def _within(self, coordinates: FloatArray) -> FloatArray:
        np.maximum(coordinates, self.lower, out=coordinates)
        np.minimum(coordinates, self.upper, out=coordinates)
        return coordinates

    def _step(self, loss: float, smoothing: float) -> float | None:
        """One step down; the new loss, or `None` when no step, however short, lowers it."""
        gradient, hessian = self.problem.derivatives(self.parameters)
        moves = self._within(self.coordinates - gradient) != self.coordinates
        gradient *= moves
        hessian *= moves
        hessian *= moves[:, None]
        diagonal = hessian.reshape(-1)[_DIAGONAL]
        undamped = diagonal + ~moves
        damped = undamped + _LEAST_CURVATURE
        for _ in range(_MAX_TRIALS):
            np.add(undamped, self.damping * damped, out=diagonal)
            step = np.linalg.solve(hessian, gradient)
            np.minimum(step, _LONGEST_STEP, out=step)
            np.maximum(step, -_LONGEST_STEP, out=step)
            coordinates = self._within(self.coordinates - step)
            parameters = to_parameters(coordinates)
            lowered = self.problem.loss(parameters, smoothing)
            if lowered < loss:
                self.coordinates, self.parameters = coordinates, parameters
                self.damping = max(self.damping / 10.0, _LEAST_DAMPING)
                return lowered
            self.damping *= 10.0
        self.damping = _FIRST_DAMPING
        return None


def minimise(problem: FitProblem, start: FloatArray, free: npt.NDArray[np.bool_], near: bool = False) -> Minimum:
    """The parameters of least loss that a descent from `start` finds; those not `free` stay as they are.

    Works in stages with less and less smoothing, so that a fit that can be perfect does not stick to its kink; a
    start that is `near` skips to the last stage.
    """
    descent = _Descent(problem, start, free)
    converged = True
    for smoothing, tolerance in _STAGES[_LAST if near else 0 :]:
        converged = descent.run(smoothing, tolerance)
    return Minimum(descent.parameters, problem.loss(descent.parameters), converged)
