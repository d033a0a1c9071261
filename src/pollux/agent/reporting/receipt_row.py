"""The entries of a receipt: rows, each a moment of the run, and events."""

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
    """One moment of a run. `progress`, `samples` and `seconds` count from the first start of the job.

    `progress` is Σ samples × efficiency in samples at the initial batch, `seconds` the time spent training,
    `throughput` the measured samples per second, `goodput` the fitted model's prediction for this configuration
    (measured goodput is throughput × efficiency). `lr_factors` are the rule's factors of the learning rate by parameter
    group, `learning_rates` the rates used, base × factor. `noise_high` None: no upper bound. Elsewhere None means: not
    known. Values that are not finite become None.
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
        """(replicas, nodes, local batch, accumulation, total batch)."""
        return (self.num_replicas, self.num_nodes, self.local_batch, self.accumulation, self.total_batch)


@dataclass(frozen=True, slots=True)
class ReceiptEvent:
    """An event of the run, at a step and a progress; `time` is in seconds since 1970, UTC."""

    kind: str
    step: int
    progress: float
    text: str
    time: float
    numbers: Mapping[str, float] = field(default_factory=dict)
