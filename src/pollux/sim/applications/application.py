"""The interface of applications: step times and gradient noise of a kind of training job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pollux.goodput import BatchLimits

__all__ = ["Application", "FixedConfiguration"]


@dataclass(frozen=True, slots=True)
class FixedConfiguration:
    """GPUs and total batch that an application keeps even under adaptive policies."""

    num_gpus: int
    batch_size: int


class Application(Protocol):
    """The true behaviour of one kind of job. Progress is counted in steps of the initial batch."""

    @property
    def name(self) -> str:
        """The name, as workloads spell it."""

    @property
    def limits(self) -> BatchLimits:
        """Initial and maximum total batch, smallest and largest local batch."""

    @property
    def fixed(self) -> FixedConfiguration | None:
        """What adaptive policies may not change, if anything."""

    @property
    def max_nodes(self) -> int:
        """Most nodes for which step times are known."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Total batches for which whole runs are known, ascending."""

    @property
    def progress(self) -> tuple[float, ...]:
        """Progress at the end of each epoch; the job is done at the last."""

    def step_and_sync_seconds(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """One optimiser step without accumulation on GPUs-per-node `counts`, and the part spent synchronising."""

    def gradient_statistics(self, total_batch: float, epoch: int) -> tuple[float, float]:
        """(grad_sqr, grad_var) during an epoch (from 0) at a total batch."""

    def iterations(self, total_batch: int, epoch: int) -> float:
        """Real optimiser steps that a run at `total_batch` needs for its first `epoch` epochs."""
