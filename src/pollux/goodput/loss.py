"""The loss of a throughput fit, with its derivatives. `solver` finds its minimum.

Parameters are (αc, βc, constant and growth across nodes, constant and growth within a node, γ). T_sync is
linear in the four in the middle and comes as a `SyncBasis`, so that any model of that form can be fitted.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.goodput.throughput import MAX_OVERLAP, FloatArray

__all__ = [
    "GAMMA_PENALTY",
    "GROWTH_PENALTY",
    "LOWER",
    "NUM_PARAMETERS",
    "UPPER",
    "FitProblem",
    "to_coordinates",
    "to_parameters",
]

NUM_PARAMETERS = 7
LOWER = np.array([1e-8] * 6 + [1.0])
UPPER = np.array([1e8] * 6 + [MAX_OVERLAP])

GAMMA_PENALTY = 1e-3
GROWTH_PENALTY = 1e-2

_NO_SECONDS = 1e-30


def to_coordinates(parameters: FloatArray) -> FloatArray:
    """Logarithms of the first six parameters, and γ itself: in these the loss is well scaled."""
    coordinates = np.log(parameters)
    coordinates[6] = parameters[6]
    return coordinates


def to_parameters(coordinates: FloatArray) -> FloatArray:
    """The inverse of `to_coordinates`."""
    parameters = np.exp(coordinates)
    parameters[6] = coordinates[6]
    return parameters


class FitProblem:
    """RMSE(log T_grad) + RMSE(log T_step) + 1e-3(γ−1)² + 1e-2[(βn/αn)² + (βr/αr)²] over weighted rows, Eq. (G18).

    Smoothed by δ: an RMSE r counts as sqrt(r² + δ²), Eq. (G19), since a perfect fit would otherwise sit on a kink.
    """

    def __init__(
        self,
        local_batch: FloatArray,
        basis: FloatArray,
        compute_seconds: FloatArray,
        step_seconds: FloatArray,
        weight: FloatArray,
    ) -> None:
        rows = len(local_batch)
        self.local_batch = local_batch
        self.basis = basis
        self.measured = np.array([compute_seconds, step_seconds])
        self.weight = weight / weight.sum()
        self.evaluations = 0
        self._target = np.log(self.measured)
        self._columns = np.empty((6, rows))
        self._columns[0] = 1.0
        self._columns[1] = local_batch
        self._columns[2:] = basis
        self._factors = np.zeros((2, 6))
        self._allocate(rows)

    def _allocate(self, rows: int) -> None:
        """Errors, their weights and their Jacobian: R of T_grad, R of T_step, then the three penalties.

        A penalty p·exp(2u) is a row of weight 4p·exp(2u) and error 1/2: gradient and curvature are exact.
        """
        self._all_errors = np.full(2 * rows + 3, 0.5)
        self._all_weights = np.full(2 * rows + 3, 2.0 * GAMMA_PENALTY)
        self._jacobian = jacobian = np.zeros((NUM_PARAMETERS, 2 * rows + 3))
        self._errors = self._all_errors[: 2 * rows].reshape(2, rows)
        self._compute_errors, self._step_errors = self._errors
        self._compute_weights, self._step_weights = self._all_weights[: 2 * rows].reshape(2, rows)
        first, second = slice(0, rows), slice(rows, 2 * rows)
        self._compute_by_compute = jacobian[:2, first]
        self._compute_by_alpha, self._compute_by_beta = self._compute_by_compute
        self._step_by_compute = jacobian[:2, second]
        self._step_by_sync = jacobian[2:6, second]
        self._step_by_gamma = jacobian[6, second]
        jacobian[2, -3] = jacobian[4, -2] = -1.0
        jacobian[3, -3] = jacobian[5, -2] = jacobian[6, -1] = 1.0

    def loss(self, parameters: FloatArray, smoothing: float = 0.0) -> float:
        """The loss, Eq. (G18); leaves behind what `derivatives` at the same parameters needs."""
        self.evaluations += 1
        _, _, alpha_n, beta_n, alpha_r, beta_r, gamma = parameters.tolist()
        factors = self._factors
        factors[0, :2] = parameters[:2]
        factors[1, 2:] = parameters[2:6]
        self._seconds = seconds = factors @ self._columns
        np.maximum(seconds, _NO_SECONDS, out=seconds)
        self._logs = logs = np.log(seconds)
        log_compute, log_sync = logs
        power = log_compute - log_sync
        np.abs(power, out=power)
        power *= -gamma
        np.exp(power, out=power)
        np.log1p(power, out=power)
        power /= gamma
        self._log_step = log_step = np.maximum(log_compute, log_sync)
        log_step += power
        errors = self._errors
        self._compute_errors[:] = log_compute
        self._step_errors[:] = log_step
        errors -= self._target
        mean_squares = ((errors * errors) @ self.weight).tolist()
        floor = smoothing * smoothing
        self.rmse = math.sqrt(mean_squares[0] + floor), math.sqrt(mean_squares[1] + floor)
        across: float = GROWTH_PENALTY * (beta_n / alpha_n) ** 2
        within: float = GROWTH_PENALTY * (beta_r / alpha_r) ** 2
        self._growth = across, within
        penalty: float = GAMMA_PENALTY * (gamma - 1.0) ** 2 + across + within
        return self.rmse[0] + self.rmse[1] + penalty

    def derivatives(self, parameters: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gradient in `to_coordinates`, and a positive approximation of the Hessian.

        For the parameters and smoothing of the last call of `loss`. Each RMSE is replaced by the parabola
        that touches it, and that by its Gauss-Newton form, as in iteratively reweighted least squares.
        """
        self._fill_jacobian(parameters)
        weights, jacobian = self._all_weights, self._jacobian
        np.multiply(self.weight, 1.0 / max(self.rmse[0], _NO_SECONDS), out=self._compute_weights)
        np.multiply(self.weight, 1.0 / max(self.rmse[1], _NO_SECONDS), out=self._step_weights)
        weights[-3] = 4.0 * self._growth[0]
        weights[-2] = 4.0 * self._growth[1]
        self._all_errors[-1] = parameters[6] - 1.0
        weighted = jacobian * weights
        return weighted @ self._all_errors, weighted @ jacobian.T

    def _fill_jacobian(self, parameters: FloatArray) -> None:
        """d log T_grad and d log T_step in the coordinates, Eq. (G20).

        With the shares T_grad^γ/T_step^γ and T_sync^γ/T_step^γ: d log T_step = share·d log T_grad +
        share·d log T_sync + Σ share·log(T/T_step)/γ·dγ.
        """
        gamma = float(parameters[6])
        compute, sync = self._seconds
        relative = self._logs - self._log_step
        shares = relative * gamma
        np.exp(shares, out=shares)
        compute_share, sync_share = shares
        relative *= shares
        np.add(relative[0], relative[1], out=self._step_by_gamma)
        self._step_by_gamma /= gamma
        np.divide(parameters[0], compute, out=self._compute_by_alpha)
        np.subtract(1.0, self._compute_by_alpha, out=self._compute_by_beta)
        np.multiply(self._compute_by_compute, compute_share, out=self._step_by_compute)
        sync_share /= sync
        np.multiply(self.basis, sync_share, out=self._step_by_sync)
        self._step_by_sync *= parameters[2:6, None]
