"""Chooses the next batch by the goodput model, with the agent's rules of caution. A pure computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.goodput import BatchChoice, BatchLimits, GoodputModel, ThroughputModel

__all__ = ["LEAST_GAIN", "MAX_GROWTH", "MAX_RELATIVE_WIDTH", "BatchChange", "fitting_choice", "is_clear", "next_batch"]

MAX_GROWTH = 2.0
LEAST_GAIN = 1.05
MAX_RELATIVE_WIDTH = 1.0
_TOTALS = 48


@dataclass(frozen=True, slots=True)
class BatchChange:
    """Another batch: its predicted goodput, the ratio to the present one, its efficiency, and the reason."""

    choice: BatchChoice
    gain: float
    goodput: float
    efficiency: float
    reason: str


def is_clear(estimate: NoiseEstimate) -> bool:
    """Whether the noise is known well enough to choose a batch: to a relative width of `MAX_RELATIVE_WIDTH`."""
    return estimate.is_known and estimate.relative_width <= MAX_RELATIVE_WIDTH


def fitting_choice(total: int, num_replicas: int, local_max: int | None, accumulation: int = 0) -> BatchChoice:
    """A total batch split over K replicas, with `accumulation` extra micro-steps, or more where memory needs it."""
    local = -(-total // num_replicas)
    repeats = accumulation + 1
    if local_max is not None:
        repeats = max(repeats, -(-local // local_max))
    return BatchChoice(-(-local // repeats), repeats - 1, num_replicas)


def next_batch(
    current: BatchChoice,
    estimate: NoiseEstimate,
    throughput: ThroughputModel,
    limits: BatchLimits,
    num_nodes: int,
    efficiency: Callable[[int], float] | None = None,
    accumulation: int = 0,
) -> BatchChange | None:
    """The batch of highest goodput within reach, or None to stay.

    `efficiency` gives the progress per sample at a total batch: by default Eq. (G10), less where the learning-rate rule
    scales less. `accumulation` is the least that is allowed.

    Within reach: from M0 to the user's ceiling, between half and twice the present total. None while the noise
    is not known to a relative width of 1, and for a predicted gain of 5 % or less.
    """
    if not is_clear(estimate):
        return None
    ceiling = max(min(limits.maximum, int(current.total * MAX_GROWTH)), limits.initial)
    floor = max(limits.initial, math.ceil(current.total / MAX_GROWTH))
    model = GoodputModel(throughput, estimate.efficiency, replace(limits, maximum=ceiling))
    counted = efficiency if efficiency is not None else model.efficiency_at

    def goodput_at(choice: BatchChoice) -> float:
        return model.goodput_at(choice, num_nodes) / model.efficiency_at(choice.total) * counted(choice.total)

    present = goodput_at(current)
    candidates = _candidates(model, current.num_gpus, num_nodes, floor, ceiling, accumulation)
    best = max(candidates, key=goodput_at, default=None)
    if best is None or best == current:
        return None
    goodput = goodput_at(best)
    if goodput <= LEAST_GAIN * present:
        return None
    reason = (
        f"noise scale {estimate.noise_scale:,.0f} ({estimate.low:,.0f} to {estimate.high:,.0f}): predicted goodput "
        f"{goodput:,.1f} against {present:,.1f} samples/s, efficiency {counted(best.total):.2f}"
    )
    return BatchChange(best, goodput / present, goodput, counted(best.total), reason)


def _candidates(
    model: GoodputModel, num_replicas: int, num_nodes: int, floor: int, ceiling: int, accumulation: int
) -> Iterator[BatchChoice]:
    """The model's own best, and totals in geometric steps with as little accumulation as memory allows.

    On one GPU the model assumes accumulation beyond M0, since noise shows only between two gradients. The agent
    compares two halves of the batch, on measured steps only; other steps need one micro-step.
    """
    best, _ = model.best_batch(num_nodes, num_replicas)
    if floor <= best.total <= ceiling and best.accumulation >= accumulation:
        yield best
    for number in range(_TOTALS + 1):
        total = round(floor * (ceiling / floor) ** (number / _TOTALS))
        choice = fitting_choice(total, num_replicas, model.limits.local_max, accumulation)
        if choice.total > ceiling:
            choice = BatchChoice(
                ceiling // (num_replicas * (choice.accumulation + 1)), choice.accumulation, num_replicas
            )
        if choice.local_batch >= 1 and floor <= choice.total:
            yield choice
