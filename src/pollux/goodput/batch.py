"""The best batch of one placement: limits, the split of a total batch, and the search.

The search over many jobs and placements at once is in `tables`, and takes the same decisions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pollux.core.errors import InvalidInput
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.throughput import ThroughputModel, overlapped_seconds

__all__ = [
    "OVERLAP_EXPONENT",
    "PUBLISHED_TOTALS",
    "BatchChoice",
    "BatchLimits",
    "best_batch",
    "published_best_batch",
    "split_total",
]

OVERLAP_EXPONENT = -0.7
"""γ to this power weighs the root without overlap in the first guess at the root, Eq. (G16); found by trial."""

PUBLISHED_TOTALS = 50
_CEILING_SLACK = 1e-8
_ROOT_TOLERANCE = 1e-4
_MAX_ROOT_STEPS = 40


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a job's batch may be, in samples; Eq. (G12).

    `initial` (M0) to `maximum` bound the total batch, `local_min` to `local_max` what one GPU takes at once;
    `accumulation` says whether a GPU may take several local batches per optimiser step.
    """

    initial: int
    maximum: int
    local_min: int
    local_max: int
    accumulation: bool = True

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "local_min", "local_max"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise InvalidInput(f"{name} is {value}: give a whole number of samples, 1 or more")
        if self.maximum < self.initial:
            raise InvalidInput(
                f"maximum is {self.maximum}, below initial {self.initial}: raise maximum or lower initial"
            )
        if self.local_max < self.local_min:
            raise InvalidInput(f"local_max is {self.local_max}, below local_min {self.local_min}: swap or widen them")
        if self.local_min > self.initial:
            raise InvalidInput(
                f"local_min is {self.local_min}, above initial {self.initial}: one GPU could not run the "
                "initial batch; lower local_min"
            )


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """K GPUs, each taking `accumulation` + 1 local batches per optimiser step. All zero: cannot run."""

    local_batch: int
    accumulation: int
    num_gpus: int

    @property
    def total(self) -> int:
        """M = K·m·(s + 1), Eq. (G1)."""
        return self.num_gpus * self.local_batch * (self.accumulation + 1)


def split_total(total: int, num_gpus: int, limits: BatchLimits) -> BatchChoice:
    """How a fixed total batch is run on K GPUs, Eq. (G13).

    local = ceil(M/K); s = ceil(local/local_max) − 1, at least 1 when K = 1 and M > M0, so that there are two
    gradients to tell noise from; m = ceil(local/(s+1)), at most floor(maximum/(K(s+1))).
    """
    if total < 1 or num_gpus < 1:
        raise InvalidInput(f"cannot split a batch of {total} over {num_gpus} GPUs: give 1 or more of both")
    local = -(-total // num_gpus)
    accumulation = 0
    if limits.accumulation:
        accumulation = -(-local // limits.local_max) - 1
        if num_gpus == 1 and total > limits.initial:
            accumulation = max(accumulation, 1)
    local_batch = min(-(-local // (accumulation + 1)), limits.maximum // (num_gpus * (accumulation + 1)))
    if local_batch < 1:
        raise InvalidInput(
            f"a batch of {total} (maximum {limits.maximum}) leaves some of {num_gpus} GPUs without a sample: use fewer"
        )
    return BatchChoice(min(local_batch, limits.local_max), accumulation, num_gpus)


def _can_run(limits: BatchLimits, num_nodes: int, num_gpus: int) -> bool:
    """Whether a placement exists and can hold at least the smallest and the initial batch; see Eq. (G12)."""
    if not 1 <= num_nodes <= num_gpus or limits.local_min * num_gpus > limits.maximum:
        return False
    return limits.accumulation or num_gpus * limits.local_max >= limits.initial


class _Placement:
    """The goodput of one job on one placement as a function of m and x = s + 1."""

    __slots__ = ("intercept", "noise", "num_gpus", "overlap", "signal", "slope", "sync")

    def __init__(self, throughput: ThroughputModel, efficiency: Efficiency, num_nodes: int, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.intercept = throughput.compute_seconds(0.0)
        self.slope = throughput.compute_seconds(1.0) - self.intercept
        self.sync = throughput.sync_seconds(float(num_nodes), float(num_gpus))
        self.overlap = throughput.overlap
        self.noise = efficiency.noise_share
        self.signal = (1.0 - self.noise) / efficiency.initial_batch

    def goodput(self, local_batch: int, repeats: int) -> float:
        """M/T_iter · EFFICIENCY(M), Eq. (G11), with T_iter by Eq. (G6) and EFFICIENCY = 1/(noise + signal·M)."""
        compute = self.intercept + self.slope * local_batch
        total = self.num_gpus * local_batch * repeats
        step = (repeats - 1) * compute + overlapped_seconds(compute, self.sync, self.overlap)
        return total / (step * (self.noise + self.signal * total))

    def best_full_repeats(self, local_max: int) -> float:
        """The real x at which goodput peaks when every local batch is full, Eq. (G15).

        With T = a·x + b, goodput ∝ x/((a·x + b)(noise + signal·K·m·x)): x* = sqrt(b·noise/(a·signal·K·m)).
        """
        compute = self.intercept + self.slope * local_max
        exposed = overlapped_seconds(compute, self.sync, self.overlap) - compute
        if exposed <= 0.0:
            return 0.0
        growth = compute * self.signal * self.num_gpus * local_max
        return math.sqrt(exposed * self.noise / growth) if growth > 0.0 else math.inf

    def log_slope(self, local_batch: float, repeats: int) -> tuple[float, float]:
        """d log goodput / d log m at fixed x, and its own derivative in log m, which is never positive.

        The slope is φ/(φ + M) − m·T'/T, the two sides of Eq. (G14): the gain of a larger batch minus its cost in
        time.
        """
        compute = self.intercept + self.slope * local_batch
        sync, overlap = self.sync, self.overlap
        if compute >= sync:
            power = (sync / compute) ** overlap
            overlapped = compute * (1.0 + power) ** (1.0 / overlap)
            share = 1.0 / (1.0 + power)
        else:
            power = (compute / sync) ** overlap
            overlapped = sync * (1.0 + power) ** (1.0 / overlap)
            share = power / (1.0 + power)
        rate = share * overlapped / compute
        cost_rate = repeats - 1 + rate
        grown = self.slope * local_batch
        elasticity = grown * cost_rate / ((repeats - 1) * compute + overlapped)
        bend = grown * (overlap - 1.0) * rate * (1.0 - share) / (compute * cost_rate) if cost_rate > 0.0 else 0.0
        value = self.noise / (self.noise + self.signal * self.num_gpus * local_batch * repeats)
        return value - elasticity, -value * (1.0 - value) - elasticity * (1.0 + bend - elasticity)

    def near_best_local(self, repeats: int, low: int, high: int) -> float:
        """A first guess at the best m, between the roots for γ = 1 and γ → ∞, which have closed forms; Eq. (G16).

        With T = x·T_grad + T_sync, goodput peaks at m² = (αc + T_sync/x)/βc·V with V = φ/(K·x); with
        T = max(T_grad, T_sync) + (x−1)·T_grad, likewise on a side of the kink T_grad = T_sync, or at it.
        """
        growth = self.signal * self.num_gpus * repeats
        if self.slope <= 0.0 or growth <= 0.0:
            return float(high)
        scale = self.noise / growth
        compute_bound = self.intercept / self.slope * scale
        hidden = self.sync / self.slope
        sync_bound = compute_bound + hidden / (repeats - 1) * scale if repeats > 1 else math.inf
        kink = max(hidden - self.intercept / self.slope, 0.0) ** 2
        plain = compute_bound + hidden / repeats * scale
        perfect = max(compute_bound, min(kink, sync_bound))
        smallest, largest = low * low, high * high
        plain = min(max(plain, smallest), largest)
        perfect = min(max(perfect, smallest), largest)
        return math.sqrt(perfect * (plain / perfect) ** (self.overlap**OVERLAP_EXPONENT))

    def best_local(self, repeats: int, low: int, high: int) -> tuple[float, int]:
        """Best goodput and m in [low, high] at fixed x.

        In log m the slope always falls, so its root, Eq. (G14), is the only peak, and the best integer is
        next to it. Newton steps inside a shrinking bracket find the root.
        """
        below, above = low * (1.0 - 1e-9), high * (1.0 + 1e-9)
        local_batch = self.near_best_local(repeats, low, high)
        for _ in range(_MAX_ROOT_STEPS):
            slope, bend = self.log_slope(local_batch, repeats)
            if slope > 0.0:
                below = local_batch
            else:
                above = local_batch
            if above - below <= _ROOT_TOLERANCE * below:
                break
            step = slope / -bend if bend < 0.0 else math.copysign(1.0, slope)
            moved = local_batch * math.exp(max(-5.0, min(5.0, step)))
            moved = max(float(low), min(float(high), moved))
            if not below < moved < above:
                moved = math.sqrt(below * above)
            close = abs(moved - local_batch) <= _ROOT_TOLERANCE * local_batch
            local_batch = moved
            if close:
                break
        floor = max(low, min(high, int(local_batch)))
        best = (self.goodput(floor, repeats), floor)
        if floor < high:
            best = max(best, (self.goodput(floor + 1, repeats), floor + 1))
        return best


def _local_range(limits: BatchLimits, smallest_total: int, num_gpus: int, repeats: int) -> tuple[int, int]:
    """The local batches that keep Eq. (G12) at x; none when the first number is larger."""
    per_sample = num_gpus * repeats
    low = max(limits.local_min, -(-smallest_total // per_sample))
    return low, min(limits.local_max, limits.maximum // per_sample)


def best_batch(
    throughput: ThroughputModel,
    efficiency: Efficiency,
    limits: BatchLimits,
    num_nodes: int,
    num_gpus: int,
) -> tuple[BatchChoice, float]:
    """The integers m and s of highest goodput on N nodes and K GPUs, and that goodput; 0 if it cannot run.

    For a given total, fewer and larger local batches are always faster; so without integers the best is
    either s = 0, or full local batches repeated x* times, Eq. (G15). What remains to try are floor(x*) full
    repeats, and one more repeat with the best m, Eq. (G14). One GPU must repeat at least twice beyond M0, to
    have two gradients to measure with. Since m is whole, up to 1/local_max of the maximum may be left unused.
    """
    if not _can_run(limits, num_nodes, num_gpus):
        return BatchChoice(0, 0, num_gpus), 0.0
    placement = _Placement(throughput, efficiency, num_nodes, num_gpus)
    best = (0.0, 0, 1)
    if num_gpus == 1 and limits.initial <= limits.local_max:
        best = (placement.goodput(limits.initial, 1), limits.initial, 1)
        if not limits.accumulation:
            return BatchChoice(limits.initial, 0, 1), best[0]
    smallest = max(limits.initial, limits.local_min * num_gpus)
    repeats = -(-smallest // (num_gpus * limits.local_max))
    if num_gpus == 1:
        repeats = max(repeats, 2)
    if limits.accumulation and num_gpus > 1:
        peak = placement.best_full_repeats(limits.local_max)
        full = int(min(peak, limits.maximum // (num_gpus * limits.local_max)))
        if full >= repeats:
            best = (placement.goodput(limits.local_max, full), limits.local_max, full)
            repeats = full + 1
    low, high = _local_range(limits, smallest, num_gpus, repeats)
    if low <= high:
        goodput, local_batch = placement.best_local(repeats, low, high)
        best = max(best, (goodput, local_batch, repeats))
    elif best[0] == 0.0:
        best = _largest_below_maximum(placement, limits, repeats)
    goodput, local_batch, repeats = best
    return BatchChoice(local_batch, repeats - 1, num_gpus), goodput


def _largest_below_maximum(placement: _Placement, limits: BatchLimits, repeats: int) -> tuple[float, int, int]:
    """When no multiple of K lies between initial and maximum: the largest batch not above maximum."""
    num_gpus = placement.num_gpus
    local_batch = max(1, min(limits.local_max, limits.maximum // (num_gpus * repeats)))
    repeats = min(repeats, limits.maximum // (num_gpus * local_batch))
    return placement.goodput(local_batch, repeats), local_batch, repeats


def published_best_batch(
    throughput: ThroughputModel,
    efficiency: Efficiency,
    limits: BatchLimits,
    num_nodes: int,
    num_gpus: int,
) -> tuple[BatchChoice, float]:
    """The published search, Eq. (G17): 50 totals in geometric steps, each split as in `split_total`, the best taken.

    Kept as a reference for tests, benchmarks and the published simulation.
    """
    if not _can_run(limits, num_nodes, num_gpus):
        return BatchChoice(0, 0, num_gpus), 0.0
    largest = limits.maximum if limits.accumulation else min(limits.maximum, num_gpus * limits.local_max)
    smallest = min(max(limits.initial, limits.local_min * num_gpus), largest)
    locals_ = np.geomspace(smallest, largest, PUBLISHED_TOTALS) / num_gpus
    accumulation = np.zeros_like(locals_)
    if limits.accumulation:
        accumulation = np.ceil(locals_ / limits.local_max - _CEILING_SLACK) - 1.0
        if num_gpus == 1:
            forced = locals_ > limits.initial + _CEILING_SLACK
            accumulation = np.where(forced, np.maximum(accumulation, 1.0), accumulation)
        local_batch = np.ceil(locals_ / (accumulation + 1.0) - _CEILING_SLACK)
    elif num_gpus == 1:
        local_batch = np.full_like(locals_, limits.initial)
    else:
        local_batch = np.ceil(locals_ - _CEILING_SLACK)
    placement = np.array([float(num_nodes)]), np.array([float(num_gpus)])
    seconds = throughput.step_seconds(*placement, local_batch, accumulation)
    total = num_gpus * local_batch * (accumulation + 1.0)
    best = int(np.argmax(total / seconds * efficiency.efficiency(total)))
    repeats = int(accumulation[best]) + 1
    capped = max(1, min(int(local_batch[best]), limits.maximum // (num_gpus * repeats)))
    goodput = _Placement(throughput, efficiency, num_nodes, num_gpus).goodput(capped, repeats)
    return BatchChoice(capped, repeats - 1, num_gpus), goodput
