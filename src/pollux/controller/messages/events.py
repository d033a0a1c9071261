"""Facts that reach the controller. Each carries its time and the version of its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pollux.core import Decision, FixedBatchOracle, GoodputFunction, JobLimits, Node, Placement, Queue
from pollux.wire.job import JobRequest

__all__ = [
    "DecisionMade",
    "Event",
    "GenerationEnded",
    "GenerationOutcome",
    "GenerationShrunk",
    "JobCancelled",
    "JobFinished",
    "JobLimitsChanged",
    "JobPaused",
    "JobRan",
    "JobReported",
    "JobResumed",
    "JobRunning",
    "JobSpec",
    "JobSubmitted",
    "JobsForgotten",
    "NodeAdded",
    "NodeRemoved",
    "NodeSetAside",
    "NodeTakenBack",
    "QueueChanged",
    "TimeSkipped",
    "TimerFired",
]

GenerationOutcome = Literal["succeeded", "crashed", "out-of-memory", "stopped", "lost", "refused"]
"""How the replicas of a generation ended; `crashed` and `out-of-memory` count against a job's retries.

`refused`: none was started, since the backend did not have the GPUs; this never counts as a failure."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A submitted job, as far as scheduling needs it; `request` is the whole request, or None in simulations.

    It may crash `retries` times. It waits until the jobs of `after` have succeeded. `time_limit_seconds` counts while
    its replicas run. Jobs of one `group` are one claimant. A job should end by its `deadline`, on the driver's clock.
    """

    id: str
    limits: JobLimits = field(default_factory=JobLimits)
    requested_gpus: int = 1
    weight: float = 1.0
    queue: str = ""
    resize_cost_seconds: float = 30.0
    oracle: FixedBatchOracle | None = field(default=None, compare=False)
    retries: int = 0
    after: tuple[str, ...] = ()
    time_limit_seconds: float | None = None
    request: JobRequest | None = None
    kind: str = ""
    group: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events; `at` is in seconds on the driver's clock."""

    VERSION: ClassVar[int] = 1

    at: float


@dataclass(frozen=True, slots=True)
class JobSubmitted(Event):
    """A job was submitted."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobRunning(Event):
    """All replicas of a generation are training: a start or a resize is complete.

    `pause_seconds` and `resize_kind` are those of a live resize; None and empty otherwise.
    """

    job_id: str
    generation: int
    pause_seconds: float | None = None
    resize_kind: str = ""


@dataclass(frozen=True, slots=True)
class JobReported(Event):
    """A significant report of a job's agent; fields that are `None` do not change the record.

    `resize_cost_seconds` is its last pause, of the kind `resize_kind` (see `costs`); without a kind, the cost of any
    resize. It is that of the start of this `generation`, and counts once for it. Older logs have no generation here,
    and pauses of live resizes, too, which now are in `JobRunning` only. `live`: whether the job can
    follow live resizes. `progress` is the number of useful samples so far,
    `utilization` the share of a step in which the GPUs compute, `memory_bytes` the most that one of them holds.
    """

    job_id: str
    goodput: GoodputFunction | None = field(default=None, compare=False)
    remaining: float | None = None
    resize_cost_seconds: float | None = None
    local_batch: int | None = None
    resize_kind: str = ""
    live: bool | None = None
    progress: float | None = None
    loss: float | None = None
    utilization: float | None = None
    memory_bytes: float | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationShrunk(Event):
    """Some replicas of this generation are lost, or never joined; the others have the state and wait at `placement`.

    `refused`: no replica is lost; new replicas got no GPUs and were never started. `withdrawn`: no replica that ran is
    lost or has paused; new replicas did not join.
    """

    job_id: str
    generation: int
    placement: Placement
    detail: str = ""
    refused: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class GenerationEnded(Event):
    """No replica of this generation is left; the controller decides whether the job has ended."""

    job_id: str
    generation: int
    outcome: GenerationOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The time `next_timer_at` has come: a pause after a crash, or a time limit, is over."""


@dataclass(frozen=True, slots=True)
class JobRan(Event):
    """The replicas of this generation have run for `seconds` by measurement, not by the driver's clock.

    Time limits count these seconds: a clock may be put forward, a service or machine may be away for days.
    """

    job_id: str
    generation: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimeSkipped(Event):
    """The driver's clock has skipped seconds that have not passed for jobs; `at` is the time after the skip.

    Somebody put the clock forward; or the driver was `away`: then only the ages of ended jobs leave the skip out.
    """

    seconds: float
    away: bool = False


@dataclass(frozen=True, slots=True)
class JobFinished(Event):
    """A job has ended by itself."""

    job_id: str
    outcome: Literal["succeeded", "failed"] = "succeeded"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JobCancelled(Event):
    """The user cancels the job."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobPaused(Event):
    """The user pauses the job: it holds no GPUs until it is resumed."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobResumed(Event):
    """A paused job may run again."""

    job_id: str


@dataclass(frozen=True, slots=True)
class JobLimitsChanged(Event):
    """The user asks for other limits."""

    job_id: str
    limits: JobLimits


@dataclass(frozen=True, slots=True)
class JobsForgotten(Event):
    """Jobs that ended before `ended_before` are forgotten, and their names are free; see `JobRecord.is_over`."""

    ended_before: float


@dataclass(frozen=True, slots=True)
class NodeAdded(Event):
    """A node was added, or its description changed."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeRemoved(Event):
    """A node is gone, with everything that ran on it."""

    node_id: str


@dataclass(frozen=True, slots=True)
class NodeSetAside(Event):
    """Policies are to place nothing new on a node, since jobs fail there, or an operator says so."""

    node_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeTakenBack(Event):
    """A node that was set aside may be used again."""

    node_id: str


@dataclass(frozen=True, slots=True)
class QueueChanged(Event):
    """A queue was created, or its weight or quota changed."""

    queue: Queue


@dataclass(frozen=True, slots=True)
class DecisionMade(Event):
    """A policy's decision on the snapshot of `revision`; it is a fact, so that a replay does not ask the policy again.

    If it is `partial`, jobs that the allocation does not name keep their placement, and NOWHERE takes it away.
    """

    revision: int
    decision: Decision
    partial: bool = False
