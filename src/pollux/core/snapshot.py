"""What goes into a policy and what comes out: everything it may know, everything it may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pollux.core.cluster import Cluster, Queue
from pollux.core.job import JobView
from pollux.core.placement import NOWHERE, Allocation, Placement

__all__ = ["BatchMode", "Decision", "Policy", "Reason", "Snapshot"]

BatchMode = Literal["adaptive", "fixed"]
"""Whether jobs under a policy tune their batch, or keep the one their user asked for."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster at one moment. `jobs` are unfinished and in the order in which they became known."""

    revision: int
    now: float
    cluster: Cluster
    jobs: tuple[JobView, ...]
    running: Allocation = field(default_factory=dict)
    queues: Mapping[str, Queue] = field(default_factory=dict)
    seed: int = 0
    memory: object = field(default=None, compare=False)

    def placement(self, job_id: str) -> Placement:
        """Where a job is now; `NOWHERE` when it holds nothing."""
        return self.running.get(job_id, NOWHERE)

    def weight(self, job: JobView) -> float:
        """A job's weight times its queue's."""
        queue = self.queues.get(job.queue)
        return job.weight if queue is None else job.weight * queue.weight


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job got what it got: one word, the numbers behind it, and the ids of other `jobs` involved, if any."""

    code: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer. Jobs left out of `allocation` hold nothing. `memory` comes back in the next snapshot."""

    allocation: Allocation
    desired_nodes: int | None = None
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    memory: object = field(default=None, compare=False)


class Policy(Protocol):
    """A pure function from snapshot to decision: same snapshot, same decision.

    `needs` names the optional fields of `JobView` (`goodput`, `oracle`, `remaining`, `prior`, `kind`, `group`,
    `deadline`, `loss_history`, `utilization`, `memory_bytes`) without which it cannot work; a driver that cannot fill
    one refuses the policy at set-up. It may read others if they are filled.
    A simulator has no losses, a service no oracle.
    `batch` says whether jobs adapt their batch under it.
    """

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of `JobView` that must be filled."""

    @property
    def batch(self) -> BatchMode:
        """How jobs choose their batch under this policy."""

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Divide the cluster."""
