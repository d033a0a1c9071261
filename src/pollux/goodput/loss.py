"""The loss of a throughput fit, with its derivatives. Where it is smallest is for `solver` to find.

Parameters are (αc, βc, constant and growth across nodes, constant and growth within a node, γ); the columns of
T_sync in the four in the middle come from a `SyncBasis`, so any model linear in them can be fitted.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.throughput import MAX_OVERLAP, FloatArray

__all__ = ["LOWER", "UPPER", "FitProblem"]

LOWER = np.array([1e-8] * 6 + [1.0])
UPPER = np.array([1e8] * 6 + [MAX_OVERLAP])
GAMMA_PENALTY = 1e-3
GROWTH_PENALTY = 1e-2
_TINY_RATIO = 1e-30
_TINY_ERROR = 1e-9


class FitProblem:
    """RMSE(log T_grad) + RMSE(log T_step) + 1e-3(γ−1)² + 1e-2[(βn/αn)² + (βr/αr)²] over weighted rows.

    Derivatives are in the coordinates of the solver: logarithms of the first six parameters, and γ itself.
    """

    def __init__(
        self,
        local_batch: FloatArray,
        basis: FloatArray,
        compute_seconds: FloatArray,
        step_seconds: FloatArray,
        weight: FloatArray,
    ) -> None:
        self.local_batch = local_batch
        self.basis = basis
        self.measured = np.array([compute_seconds, step_seconds])
        self.target = np.log(self.measured)
        self.weight = weight / weight.sum()
        rows = len(local_batch)
        self.seconds = np.empty((2, rows))
        self.jacobian = np.zeros((7, 2, rows))
        self.evaluations = 0

    def loss(self, parameters: FloatArray) -> float:
        """The loss alone; leaves what `derivatives` needs."""
        self.evaluations += 1
        alpha, beta = parameters[0], parameters[1]
        gamma = float(parameters[6])
        compute, step = self.seconds
        np.multiply(self.local_batch, beta, out=compute)
        compute += alpha
        self.sync = sync = parameters[2:6] @ self.basis
        longer = np.maximum(compute, sync)
        ratio = np.minimum(compute, sync)
        ratio /= longer
        np.maximum(ratio, _TINY_RATIO, out=ratio)
        self.log_ratio = np.log(ratio)
        self.power = np.exp(gamma * self.log_ratio)
        self.log_whole = np.log1p(self.power)
        np.exp(self.log_whole / gamma, out=step)
        step *= longer
        self.error = np.log(self.seconds)
        self.error -= self.target
        squares = (self.error * self.error) @ self.weight
        self.rmse = math.sqrt(squares[0]), math.sqrt(squares[1])
        self.growth = (
            GROWTH_PENALTY * (parameters[3] / parameters[2]) ** 2,
            GROWTH_PENALTY * (parameters[5] / parameters[4]) ** 2,
        )
        penalty = GAMMA_PENALTY * (gamma - 1.0) ** 2 + self.growth[0] + self.growth[1]
        return float(self.rmse[0] + self.rmse[1] + penalty)

    def derivatives(self, parameters: FloatArray, free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gradient and an approximate, positive Hessian at the parameters `loss` was last called with.

        The root mean squares are replaced by the parabola that touches them, as in reweighted least squares.
        """
        gamma = float(parameters[6])
        compute = self.seconds[0]
        jacobian = self.jacobian
        whole = 1.0 + self.power
        minor = self.power / whole
        share = np.where(compute >= self.sync, 1.0 - minor, minor)
        np.divide(parameters[0], compute, out=jacobian[0, 0])
        np.subtract(1.0, jacobian[0, 0], out=jacobian[1, 0])
        np.multiply(jacobian[:2, 0], share, out=jacobian[:2, 1])
        scaled = (1.0 - share) / np.maximum(self.sync, 1e-300)
        np.multiply(self.basis, scaled, out=jacobian[2:6, 1])
        jacobian[2:6, 1] *= parameters[2:6, None]
        np.multiply(minor, self.log_ratio, out=minor)
        minor *= gamma
        minor -= self.log_whole
        np.divide(minor, gamma * gamma, out=jacobian[6, 1])
        weights = np.multiply.outer(
            (1.0 / max(self.rmse[0], _TINY_ERROR), 1.0 / max(self.rmse[1], _TINY_ERROR)), self.weight
        ).ravel()
        flat = jacobian.reshape(7, -1) * free[:, None]
        weighted = flat * weights
        gradient = weighted @ self.error.ravel()
        hessian = weighted @ flat.T
        self._add_penalties(gamma, free, gradient, hessian)
        return gradient, hessian

    def _add_penalties(self, gamma: float, free: FloatArray, gradient: FloatArray, hessian: FloatArray) -> None:
        for constant, penalty in ((2, self.growth[0]), (4, self.growth[1])):
            grown = constant + 1
            gradient[constant] -= 2.0 * penalty * free[constant]
            gradient[grown] += 2.0 * penalty * free[grown]
            hessian[constant, constant] += 4.0 * penalty * free[constant]
            hessian[grown, grown] += 4.0 * penalty * free[grown]
            cross = 4.0 * penalty * free[constant] * free[grown]
            hessian[constant, grown] -= cross
            hessian[grown, constant] -= cross
        gradient[6] += 2.0 * GAMMA_PENALTY * (gamma - 1.0) * free[6]
        hessian[6, 6] += 2.0 * GAMMA_PENALTY * free[6]
