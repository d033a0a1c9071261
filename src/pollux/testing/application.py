"""A training job in round numbers for tests of simulations; it implements the simulator's `Application`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pollux.goodput import BatchLimits

__all__ = ["FakeApplication"]

_LIMITS = BatchLimits(initial=10, maximum=160, local_min=5, local_max=40)


@dataclass(frozen=True, slots=True)
class FakeApplication:
    """Steps of `compute_seconds + seconds_per_sample · local batch`, and `sync_seconds` more on several GPUs.

    Across nodes synchronising takes three times as long. While `grad_sqr` is 0, the progress of a step is
    proportional to its batch: with the defaults, one GPU at the initial batch of 10 makes one step of progress a
    second.
    """

    name: str = "fake"
    limits: BatchLimits = _LIMITS
    progress: tuple[float, ...] = (100.0, 200.0)
    compute_seconds: float = 1.0
    seconds_per_sample: float = 0.0
    sync_seconds: float = 0.0
    grad_sqr: float = 0.0
    grad_var: float = 1.0
    max_nodes: int = 16
    fixed: Any = None
    state_bytes: float | None = None
    terms: Any = None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The initial and the largest batch."""
        return (self.limits.initial, self.limits.maximum)

    def step_and_sync_seconds(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """Seconds of a whole step, and the part of them that synchronising takes."""
        sync = self.sync_seconds * (3 if len(counts) > 1 else 1) if sum(counts) > 1 else 0.0
        return self.compute_seconds + self.seconds_per_sample * local_batch + sync, sync

    def gradient_statistics(self, total_batch: float, epoch: int) -> tuple[float, float]:
        """(grad_sqr, grad_var), the same throughout."""
        return self.grad_sqr, self.grad_var

    def iterations(self, total_batch: int, epoch: int) -> float:
        """Steps that a run at `total_batch` takes for its first epochs, in proportion to the batch."""
        return self.progress[epoch - 1] * self.limits.initial / total_batch if epoch else 0.0
