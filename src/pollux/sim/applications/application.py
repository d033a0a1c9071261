"""The interface of applications: step times and gradient noise of a kind of training job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pollux.core import JobLimits, Queue
from pollux.goodput import BatchLimits

__all__ = ["Application", "FixedConfiguration", "Terms"]


@dataclass(frozen=True, slots=True)
class FixedConfiguration:
    """GPUs and total batch that an application keeps even under adaptive policies."""

    num_gpus: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits, weight and queue that a user gave one job, beyond a line of a workload."""

    limits: JobLimits = field(default_factory=JobLimits)
    weight: float = 1.0
    queue: Queue | None = None

    def most_gpus(self, num_nodes: int, gpus_per_node: int) -> int:
        """The most GPUs that the job can have on equal nodes, by its limits and its queue's quota."""
        nodes = num_nodes if self.limits.max_nodes is None else min(self.limits.max_nodes, num_nodes)
        most = min(nodes * gpus_per_node, self.limits.max_gpus)
        quota = None if self.queue is None else self.queue.gpu_quota
        return most if quota is None else min(most, quota)


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

    @property
    def state_bytes(self) -> float | None:
        """Bytes of parameters, optimiser and buffers; None where they are not known."""

    @property
    def terms(self) -> Terms | None:
        """The user's limits of a recorded job; None for other applications."""

    def step_and_sync_seconds(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """One optimiser step without accumulation on GPUs-per-node `counts`, and the part spent synchronising."""

    def gradient_statistics(self, total_batch: float, epoch: int) -> tuple[float, float]:
        """(grad_sqr, grad_var) during an epoch (from 0) at a total batch."""

    def iterations(self, total_batch: int, epoch: int) -> float:
        """Real optimiser steps that a run at `total_batch` needs for its first `epoch` epochs."""
