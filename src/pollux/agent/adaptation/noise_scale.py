"""Gradient noise from squared gradient lengths: the estimate of one step, the running average, and its interval.

`gradient_norms` measures the lengths; `lr_rules` and `pollux.goodput` use the noise scale.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pollux.agent.adaptation.weighted_means import RunningMeans
from pollux.core.errors import CheckpointMismatch, InvalidInput
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.throughput import FloatArray

__all__ = [
    "FAR", "MEMORY", "MIN_MEASURED", "MIN_SIGNAL", "RECENT", "NoiseEstimate", "NoiseTracker", "estimates", "fieller",
]  # fmt: skip

FAR = 10.0  # times the batch: above it a bounded interval needs more evidence
MEMORY = 200.0  # effective number of measured steps in the average
RECENT = 40.0  # the same for the recent average, which shows a drift; at most memory / 4
MIN_MEASURED = 20  # below it the rows are too skewed for Student's quantiles
MIN_SIGNAL = 6.0  # standard errors of sqr
_FASTEST = 2.0
_QUANTILE = NormalDist().inv_cdf(0.975)
_STRICT_QUANTILE = NormalDist().inv_cdf(0.9995)
_DRIFT_QUANTILE = NormalDist().inv_cdf(0.995)  # checked after every row: one false alarm in some thousand rows
_OLDER = 1.5  # times the weight of the recent rows: below it both averages have mostly the same rows


def estimates(
    parts: FloatArray, whole: FloatArray, counts: FloatArray, totals: FloatArray, initial_batch: float
) -> tuple[FloatArray, FloatArray]:
    """Estimates of the squared true gradient and the variance at M0 from single steps; unbiased, maybe negative.

    A step of B samples comes in `count` parts gᵢ, each the mean over bᵢ samples, Σ bᵢ = B. With
    L = Σ (bᵢ/B)·|P⁻¹gᵢ|² (`parts`) and T = |P⁻¹ Σ (bᵢ/B)·gᵢ|² (`whole`):

        sqr = (count·T − L)/(count − 1),    var = (L − T)·(B/M0)/(count − 1)

    Uneven parts need no correction: E|P⁻¹gᵢ|² = sqr + tr/bᵢ, where tr is the trace of the (preconditioned)
    covariance of one sample's gradient, so E L = sqr + Σ (bᵢ/B)·tr/bᵢ = sqr + count·tr/B, whatever the bᵢ, and
    E T = sqr + tr/B; the two lines solve this for sqr and var = tr/M0. Empty parts must not be counted.
    Arrays have a row per step and a column per parameter group; `counts` and `totals` one entry per step.
    """
    others = (counts - 1.0)[:, np.newaxis]
    scale = (totals / initial_batch)[:, np.newaxis]
    return (counts[:, np.newaxis] * whole - parts) / others, (parts - whole) * scale / others


def fieller(mean_var: float, mean_sqr: float, cov: Sequence[Sequence[float]], quantile: float) -> tuple[float, float]:
    """Fieller's interval for ρ = var/sqr ≥ 0 of two means with covariance [[Vss, Vsv], [Vsv, Vvv]] of (sqr, var).

    It is the set of all ρ with (var − ρ·sqr)² ≤ q²·(Vvv − 2ρ·Vsv + ρ²·Vss). Where sqr may be 0 the set is unbounded and
    the answer is `(low, inf)`; where it holds all ρ, or none ≥ 0, the answer is `(0, inf)`. For a set in two pieces the
    answer is the interval around both.
    """
    square = quantile * quantile
    a = mean_sqr * mean_sqr - square * cov[0][0]
    b = mean_var * mean_sqr - square * cov[0][1]
    c = mean_var * mean_var - square * cov[1][1]
    discriminant = b * b - a * c
    if a == 0.0 or not discriminant >= 0.0:
        return 0.0, math.inf
    # First the larger root, then the other from their product c/a: so neither suffers from cancellation.
    far = (b + math.copysign(math.sqrt(discriminant), b)) / a
    near = c / (a * far) if far != 0.0 else 0.0
    first, second = min(far, near), max(far, near)
    if a < 0.0:
        return (second, math.inf) if first <= 0.0 < second else (0.0, math.inf)
    if mean_sqr <= 0.0 or second <= 0.0:
        return 0.0, math.inf
    return max(first, 0.0), second


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """An estimate of the gradient noise, averaged over the tracker's memory.

    `grad_sqr` and `grad_var` (at the initial batch) are raw means that may be below zero by chance, and the group
    tuples are their parts by parameter group. `noise_scale` is φ = M0·var/sqr, Eq. (G8), in samples, infinite where
    sqr ≤ 0. `low` to `high` is its 95 % interval; `high` is infinite where sqr is not clearly above zero, and `low` is
    then a lower bound. `group_known` says whether each group's own sqr is clearly above zero.
    """

    initial_batch: int
    noise_scale: float
    low: float
    high: float
    grad_sqr: float
    grad_var: float
    group_sqr: tuple[float, ...]
    group_var: tuple[float, ...]
    group_known: tuple[bool, ...]
    num_measured: int

    @property
    def relative_width(self) -> float:
        """(high − low)/φ; infinite where the interval is unbounded."""
        if math.isinf(self.high) or self.noise_scale == 0.0:
            return math.inf
        return (self.high - self.low) / self.noise_scale

    @property
    def is_known(self) -> bool:
        """Whether the interval is bounded and enough steps were measured for it to hold."""
        return math.isfinite(self.high) and self.num_measured >= MIN_MEASURED

    @property
    def efficiency(self) -> Efficiency:
        """The efficiency model at the point estimate, Eq. (G10); only the ratio of sqr and var matters in it."""
        return _efficiency(self.initial_batch, self.noise_scale)

    @property
    def cautious_efficiency(self) -> Efficiency:
        """The efficiency model at `low`: the least that a larger batch is worth."""
        return _efficiency(self.initial_batch, self.low)

    def gain(self, scale: float, group: int | None = None) -> float:
        """How many steps at M0 one step at S·M0 is worth, Eq. (G9), by the group's own noise where that is known.

        Else by the noise of all groups together; where that is not known either, by the lower end of its interval.
        """
        if group is not None and self.group_known[group] and self.num_measured >= MIN_MEASURED:
            phi = self.initial_batch * max(self.group_var[group], 0.0) / self.group_sqr[group]
            return float(_efficiency(self.initial_batch, phi).gain(scale))
        return float((self.efficiency if self.is_known else self.cautious_efficiency).gain(scale))

    def describe(self) -> str:
        """The estimate as one line of text."""
        measured = f"after {self.num_measured:,} measured step{'' if self.num_measured == 1 else 's'}"
        if self.is_known:
            limits = f"95 %: {_rounded(self.low)} to {_rounded(self.high)}"
            return f"noise scale {_rounded(self.noise_scale)} ({limits}) {measured}"
        if self.low > 0.0 and self.num_measured >= MIN_MEASURED:
            return f"noise scale unknown, at least {_rounded(self.low)}, {measured}"
        return f"noise scale unknown {measured}"

    def state_dict(self) -> dict[str, Any]:
        """Plain values, with None for what is infinite."""
        values = {name: getattr(self, name) for name in NoiseEstimate.__slots__}
        return {name: None if value == math.inf else value for name, value in values.items()}

    @classmethod
    def restored(cls, values: Mapping[str, Any] | None) -> NoiseEstimate | None:
        """The estimate of a `state_dict`; None for None."""
        if values is None:
            return None
        open_ended = {name: math.inf if values[name] is None else values[name] for name in ("noise_scale", "high")}
        lists = {name: tuple(values[name]) for name in ("group_sqr", "group_var", "group_known")}
        # Older checkpoints have one more entry.
        known = {name: values[name] for name in cls.__slots__}
        return cls(**{**known, **open_ended, **lists})


def _efficiency(initial_batch: int, noise_scale: float) -> Efficiency:
    """The unit of lengths is arbitrary: with sqr + var = 1, var is far above its floor."""
    share = 1.0 if math.isinf(noise_scale) else noise_scale / (noise_scale + initial_batch)
    return Efficiency(initial_batch, 1.0 - share, share)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _student(normal: float, degrees: float) -> float:
    """Student's quantile by an expansion of the normal one; within 1 % from 8 degrees of freedom on."""
    z, n = normal, max(degrees, 1.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3


class NoiseTracker:
    """Exponentially weighted means of sqr and var over measured steps, with the covariance of these means.

    A row has the weight θ^age, θ = (memory − 1)/(memory + 1); all together are worth `memory` rows of equal weight (200
    by default: twice what brings the interval's relative width below 0.5 where φ is near the batch). Steps at S·M0 pass
    S times the data, so they age the memory by θ^min(S, 2): the published factor has S in the exponent without the
    limit, which at large S would leave too few rows for any interval. Given the parameters, steps draw their samples
    independently; the variance of a mean is therefore that of the rows times Σw²/(1 − Σw²). That counts a drift of the
    true noise as variance, which makes the interval wider, never narrower.

    A second average is worth `RECENT` rows. Squared gradients shrink during training, so old rows are many times larger
    and would dominate a mean for long. Where the 99 % interval of the recent rows excludes φ of the long average, the
    true noise has drifted: the recent average then replaces the long one.
    """

    def __init__(self, initial_batch: int, num_groups: int, memory: float = MEMORY) -> None:
        if not initial_batch >= 1:
            raise InvalidInput(f"initial_batch is {initial_batch}: give the number of samples, 1 or more")
        if not num_groups >= 1:
            raise InvalidInput(f"num_groups is {num_groups}: an optimiser has at least one parameter group")
        if not (math.isfinite(memory) and memory > 1.0):
            raise InvalidInput(f"memory is {memory}: give the number of measured steps to average over, above 1")
        self.initial_batch = initial_batch
        self.memory = memory
        self.num_dropped = 0
        self.num_drifts = 0
        self.last_restart = ""
        self._clear(num_groups)

    def _clear(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._means = RunningMeans(num_groups)
        self._recent = RunningMeans(num_groups)

    @property
    def num_groups(self) -> int:
        """The parameter groups of the rows."""
        return self._num_groups

    @property
    def num_measured(self) -> int:
        """Rows since the last restart; after a drift, the effective number of kept rows, and the rows since."""
        return self._means.count

    def restart(self, reason: str, num_groups: int | None = None) -> None:
        """Forget all rows, for instance because the optimiser's groups changed."""
        self.last_restart = reason
        self._clear(self._num_groups if num_groups is None else num_groups)

    def add(self, parts: ArrayLike, whole: ArrayLike, counts: ArrayLike, totals: ArrayLike) -> int:
        """Add measured steps: rows of L and T by group, the parts and samples of each; returns how many were used.

        Rows with a value that is not finite (a step that overflowed) or with fewer than two parts are dropped.
        """
        columns = self._columns(parts, whole, counts, totals)
        usable = (columns[2] >= 2.0) & (columns[3] >= columns[2]) & np.isfinite(columns[3])
        usable &= np.isfinite(columns[0]).all(axis=1) & np.isfinite(columns[1]).all(axis=1)
        self.num_dropped += int(len(usable) - usable.sum())
        if not usable.any():
            return 0
        kept = [value[usable] for value in columns]
        sqr, var = estimates(kept[0], kept[1], kept[2], kept[3], self.initial_batch)
        for row_sqr, row_var, total in zip(sqr, var, kept[3], strict=True):
            self._add_row(np.concatenate([[row_sqr.sum(), row_var.sum()], row_sqr, row_var]), float(total))
        return int(usable.sum())

    def _columns(self, *given: ArrayLike) -> list[FloatArray]:
        """The arguments of `add` as arrays; `InvalidInput` where their shapes do not fit."""
        columns = [np.asarray(value, dtype=np.float64) for value in given]
        rows = columns[2].shape[0] if columns[2].ndim == 1 else -1
        if [value.shape for value in columns] != [(rows, self._num_groups)] * 2 + [(rows,)] * 2:
            shapes = ", ".join(str(value.shape) for value in columns)
            raise InvalidInput(f"rows of shapes {shapes}: give n x {self._num_groups} twice, then n twice")
        return columns

    def _add_row(self, row: FloatArray, total: float) -> None:
        ageing = min(max(total / self.initial_batch, 1.0), _FASTEST)
        self._means.add(row, total, _factor(self.memory) ** ageing)
        self._recent.add(row, total, _factor(min(RECENT, max(self.memory / 4.0, 2.0))))
        if self._recent.count >= RECENT and self._means.weight >= _OLDER * self._recent.weight and self._has_drifted():
            self._means = copy.deepcopy(self._recent)
            self._means.count = round(self._recent.degrees) + 1
            self.num_drifts += 1

    def _has_drifted(self) -> bool:
        sqr, var = float(self._means.mean[0]), float(self._means.mean[1])
        believed = max(var, 0.0) / sqr if sqr > 0.0 else math.inf
        low, high = self._interval(self._recent, _DRIFT_QUANTILE)
        return not low <= believed <= high

    def estimate(self) -> NoiseEstimate:
        """The estimate from the rows so far; unknown before the first."""
        means, count = self._means, self._num_groups
        sqr, var = float(means.mean[0]), float(means.mean[1])
        group_sqr, group_var = means.mean[2 : 2 + count], means.mean[2 + count :]
        low, high = self._interval(means, _QUANTILE)
        spread = means.spread
        known = np.zeros(count, dtype=bool)
        if math.isfinite(spread):
            known = group_sqr > MIN_SIGNAL * np.sqrt(means.group_moment * spread)
        return NoiseEstimate(
            initial_batch=self.initial_batch,
            noise_scale=self.initial_batch * max(var, 0.0) / sqr if sqr > 0.0 else math.inf,
            low=self.initial_batch * low,
            high=self.initial_batch * high,
            grad_sqr=sqr,
            grad_var=var,
            group_sqr=tuple(group_sqr.tolist()),
            group_var=tuple(group_var.tolist()),
            group_known=tuple(known.tolist()),
            num_measured=means.count,
        )

    def _interval(self, means: RunningMeans, quantile: float) -> tuple[float, float]:
        """Limits of φ/M0.

        Where φ is far above the batch the signal is weak: one 95 % interval in forty would be bounded and too low by
        chance. So there is no upper limit where sqr is less than `MIN_SIGNAL` standard errors above zero (the width
        would be 3/4 of φ or more, of no use), and the limit is that of a 99.9 % interval where φ is `FAR` times the
        batch or more.
        """
        spread, degrees = means.spread, means.degrees
        if not math.isfinite(spread):
            return 0.0, math.inf
        sqr, var = float(means.mean[0]), float(means.mean[1])
        cov = means.moment * spread
        low, high = fieller(var, sqr, cov.tolist(), _student(quantile, degrees))
        if sqr * FAR * means.total <= var * self.initial_batch:
            high = fieller(var, sqr, cov.tolist(), _student(_STRICT_QUANTILE, degrees))[1]
        if not sqr > MIN_SIGNAL * math.sqrt(cov[0, 0]):
            high = math.inf
        return low, high

    def state_dict(self) -> dict[str, Any]:
        """The tracker as plain numbers, strings and lists."""
        return {
            "initial_batch": self.initial_batch,
            "num_groups": self._num_groups,
            "num_measured": self.num_measured,
            "num_dropped": self.num_dropped,
            "num_drifts": self.num_drifts,
            "last_restart": self.last_restart,
            **self._means.state_dict(),
            "recent": {"count": self._recent.count, **self._recent.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of the same initial batch; the memory stays that of this tracker.

        An older checkpoint may lack the average of recent rows, which then starts empty.
        """
        if state["initial_batch"] != self.initial_batch:
            raise CheckpointMismatch(
                f"noise statistics are for an initial batch of {state['initial_batch']}, this job's is "
                f"{self.initial_batch}: start with the same batch_size, or without the checkpoint"
            )
        num_groups = int(state["num_groups"])
        means = RunningMeans.restored(state, num_groups, int(state["num_measured"]))
        kept = state.get("recent")
        recent = RunningMeans.restored(kept, num_groups, int(kept["count"])) if kept else RunningMeans(num_groups)
        self._clear(num_groups)
        self._means, self._recent = means, recent
        self.num_dropped, self.num_drifts = int(state["num_dropped"]), int(state.get("num_drifts", 0))
        self.last_restart = str(state["last_restart"])


def _factor(memory: float) -> float:
    """The factor by which a row's weight falls with each later row, in an average worth `memory` rows."""
    return (memory - 1.0) / (memory + 1.0)
