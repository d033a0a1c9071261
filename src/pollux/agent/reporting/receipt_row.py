"""What a receipt is made of: moments of a run, and what happened to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ReceiptEvent", "ReceiptRow", "finite"]


def finite(value: float | None) -> float | None:
    """The value; None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """One moment of a run. `progress`, `samples` and `seconds` count from the very beginning of the job.

    `progress` is Σ samples × efficiency in samples at the initial batch, `seconds` the time spent training,
    `throughput` the samples per second that were measured, `goodput` what the fitted model predicts for this
    configuration (measured goodput is throughput × efficiency). `lr_factors` has what the rule multiplies the rate
    of each parameter group by, `learning_rates` the rates used, base × factor. `noise_high` None: no upper bound.
    Other values that may be None are None where they are not known; what is not finite becomes None.
    """

    step: int
    progress: float
    samples: int
    seconds: float
    num_replicas: int
    num_nodes: int
    local_batch: int
    accumulation: int
    total_batch: int
    lr_factors: tuple[float, ...]
    efficiency: float
    throughput: float | None = None
    goodput: float | None = None
    noise_scale: float | None = None
    noise_low: float | None = None
    noise_high: float | None = None
    loss: float | None = None
    learning_rates: tuple[float, ...] = ()

    @property
    def configuration(self) -> tuple[int, int, int, int, int]:
        """(replicas, nodes, local batch, accumulation, total batch): what counts as a change of the run."""
        return (self.num_replicas, self.num_nodes, self.local_batch, self.accumulation, self.total_batch)


@dataclass(frozen=True, slots=True)
class ReceiptEvent:
    """Something that happened to the run, at a step and a progress; `time` in seconds since 1970, UTC."""

    kind: str
    step: int
    progress: float
    text: str
    time: float
    numbers: Mapping[str, float] = field(default_factory=dict)
