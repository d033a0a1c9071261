"""Exponentially weighted means of rows of numbers, and the sums that the covariance of these means needs.

`noise_scale` makes the rows, and decides between a long and a recent average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pollux.core.errors import CheckpointMismatch
from pollux.goodput.throughput import FloatArray

__all__ = ["RunningMeans"]


class RunningMeans:
    """Weighted means of squared gradient lengths `sqr` and their variance `var`, overall and by parameter group.

    `mean` holds sqr and var of all groups together, then each group's sqr, then each group's var. `moment` is the
    weighted sum of squared deviations of the first two, `group_moment` that of each group's sqr. The means divide by
    the sum of the weights, so they need no correction at the start. `total` is the mean batch of the rows, in samples.
    """

    __slots__ = ("count", "group_moment", "mean", "moment", "total", "weight", "weight_squares")

    def __init__(self, num_groups: int) -> None:
        self.count = 0
        self.weight = 0.0
        self.weight_squares = 0.0
        self.total = 0.0
        self.mean: FloatArray = np.zeros(2 * num_groups + 2)
        self.moment: FloatArray = np.zeros((2, 2))
        self.group_moment: FloatArray = np.zeros(num_groups)

    def add(self, row: FloatArray, total: float, factor: float) -> None:
        """Add the row of a step of `total` samples; the weight of all earlier rows is multiplied by `factor`."""
        self.count += 1
        self.weight = factor * self.weight + 1.0
        self.weight_squares = factor * factor * self.weight_squares + 1.0
        self.total += (total - self.total) / self.weight
        change = row - self.mean
        self.mean = self.mean + change / self.weight
        kept = 1.0 - 1.0 / self.weight
        self.moment = factor * self.moment + kept * np.outer(change[:2], change[:2])
        groups = change[2 : 2 + len(self.group_moment)]
        self.group_moment = factor * self.group_moment + kept * groups * groups

    @property
    def spread(self) -> float:
        """The factor from weighted sums of squares to the variance of the means, for independent rows.

        It is Σw²/(1 − Σw²) for weights that sum to 1, divided by the weight; infinite below two rows.
        """
        if self.count < 2:
            return math.inf
        concentration = self.weight_squares / self.weight**2
        return concentration / (1.0 - concentration) / self.weight

    @property
    def degrees(self) -> float:
        """Degrees of freedom of that variance: the effective number of rows, less 1."""
        return self.weight**2 / self.weight_squares - 1.0 if self.count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "weight": self.weight,
            "weight_squares": self.weight_squares,
            "total": self.total,
            "mean": self.mean.tolist(),
            "moment": self.moment.tolist(),
            "group_moment": self.group_moment.tolist(),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], num_groups: int, count: int) -> RunningMeans:
        """The means of a `state_dict`, of `count` rows; refuses another number of groups."""
        means = cls(num_groups)
        arrays = {name: np.array(state[name], dtype=np.float64) for name in ("mean", "moment", "group_moment")}
        if any(array.shape != getattr(means, name).shape for name, array in arrays.items()):
            raise CheckpointMismatch(f"noise statistics do not fit {num_groups} parameter groups: leave them out")
        means.count = count
        means.weight, means.weight_squares = float(state["weight"]), float(state["weight_squares"])
        means.total = float(state["total"])
        means.mean, means.moment, means.group_moment = arrays["mean"], arrays["moment"], arrays["group_moment"]
        return means
