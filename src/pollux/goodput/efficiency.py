"""Statistical efficiency: how much of a larger batch is useful. How its inputs are measured is not here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pollux.core.errors import InvalidInput
from pollux.goodput.throughput import Quantity

__all__ = ["MIN_GRAD_VAR", "Efficiency"]

MIN_GRAD_VAR = 1e-6


@dataclass(frozen=True, slots=True)
class Efficiency:
    """EFFICIENCY(M) = (φ + M0)/(φ + M), Eq. (G10), with the noise scale φ = M0·var/sqr, Eq. (G8) (§3.1).

    `grad_sqr` is the squared length of the true gradient, `grad_var` the variance of its estimate at the
    initial batch M0, in the same unit. Raw estimates may be below zero: `from_estimates` clamps them.
    """

    initial_batch: int
    grad_sqr: float
    grad_var: float

    def __post_init__(self) -> None:
        if not self.initial_batch >= 1 or math.isinf(self.initial_batch):
            raise InvalidInput(f"initial_batch is {self.initial_batch}: give the number of samples, 1 or more")
        for name, value in (("grad_sqr", self.grad_sqr), ("grad_var", self.grad_var)):
            if not (math.isfinite(value) and value >= 0.0):
                raise InvalidInput(f"{name} is {value}: give a finite number, 0 or more")
        if self.grad_var < MIN_GRAD_VAR:
            object.__setattr__(self, "grad_var", MIN_GRAD_VAR)

    @classmethod
    def from_estimates(cls, initial_batch: int, grad_sqr: float, grad_var: float) -> Efficiency:
        """Unbiased estimates may fall below zero by chance; they are clamped to sqr ≥ 0, var ≥ 1e-6."""
        return cls(initial_batch, max(grad_sqr, 0.0), max(grad_var, MIN_GRAD_VAR))

    @property
    def noise_scale(self) -> float:
        """φ = M0·var/sqr, Eq. (G8), in samples; infinite where the gradient has vanished."""
        if self.grad_sqr == 0.0:
            return math.inf
        return self.initial_batch * self.grad_var / self.grad_sqr

    @property
    def noise_share(self) -> float:
        """var/(var + sqr) = φ/(φ + M0) by Eq. (G8), in [0, 1]: the form in which nothing overflows."""
        return 1.0 / (1.0 + self.grad_sqr / self.grad_var)

    def gain(self, scale: Quantity) -> Quantity:
        """gain(S) = (var + sqr)/(var/S + sqr), Eq. (G9): steps at M0 that one step at M = S·M0 is worth."""
        return scale * self._efficiency(scale)

    def efficiency(self, total_batch: Quantity) -> Quantity:
        """gain(S)/S with S = M/M0, Eq. (G10): progress per sample relative to M0; 1 at M0, below 1 beyond it."""
        return self._efficiency(total_batch / self.initial_batch)

    def _efficiency(self, scale: Quantity) -> Quantity:
        noise = self.noise_share
        result: Quantity = 1.0 / (noise + (1.0 - noise) * scale)
        return result
