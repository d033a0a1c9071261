"""Facts that reach the controller. Each carries when it happened and a version of its shape."""

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
    "JobReported",
    "JobResumed",
    "JobRunning",
    "JobSpec",
    "JobSubmitted",
    "JobsForgotten",
    "NodeAdded",
    "NodeRemoved",
    "QueueChanged",
    "TimerFired",
]

GenerationOutcome = Literal["succeeded", "crashed", "out-of-memory", "stopped", "lost", "refused"]
"""How the replicas of a generation ended; `crashed` and `out-of-memory` count against a job's retries.

`refused`: none was ever started, since the backend could not have the places; it never counts as a failure."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a user submits, as far as scheduling goes; `request` is the whole of it, where there is something to launch.

    `retries` crashes are forgiven. It waits until the jobs of `after` have succeeded. `time_limit_seconds` count while
    it holds GPUs.
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


@dataclass(frozen=True, slots=True)
class Event:
    """Root of all events; `at` is in seconds on the driver's clock."""

    VERSION: ClassVar[int] = 1

    at: float


@dataclass(frozen=True, slots=True)
class JobSubmitted(Event):
    """A job is now known."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobRunning(Event):
    """Replicas of a generation are training: the end of a start or of a resize.

    `pause_seconds` is what a change in living processes took, `resize_kind` what it was; None and empty otherwise.
    """

    job_id: str
    generation: int
    pause_seconds: float | None = None
    resize_kind: str = ""


@dataclass(frozen=True, slots=True)
class JobReported(Event):
    """A job's agent has news; fields that are `None` leave what is known as it is.

    `resize_cost_seconds` is its last pause, and `resize_kind` of what kind that was (see `costs`); without a kind it is
    what any change costs. The pause of a change in living processes stands in `JobRunning`; logs of before have it here
    as well. `live`: its replicas can change while they run. `progress` are useful samples so far.
    """

    job_id: str
    goodput: GoodputFunction | None = field(default=None, compare=False)
    remaining: float | None = None
    resize_cost_seconds: float | None = None
    local_batch: int | None = None
    resize_kind: str = ""
    live: bool | None = None
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationShrunk(Event):
    """Some replicas of this generation are gone, or never came; the others hold the state and wait at `placement`.

    `refused`: no replica is lost; those that were to join got no GPUs, and were never started. `withdrawn`: no replica
    that ran is lost, or has paused; those that were to join did not come.
    """

    job_id: str
    generation: int
    placement: Placement
    detail: str = ""
    refused: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class GenerationEnded(Event):
    """No replica of this generation is left; what that means for the job (done, retry, failed) the controller says."""

    job_id: str
    generation: int
    outcome: GenerationOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    """The time that the controller named as `next_timer_at` has come: a pause after a crash or a time limit is over."""


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
    """Jobs that ended before `ended_before` are forgotten, and their names are free."""

    ended_before: float


@dataclass(frozen=True, slots=True)
class NodeAdded(Event):
    """A node arrived, or one that is there changed."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeRemoved(Event):
    """A node is gone, with whatever ran there."""

    node_id: str


@dataclass(frozen=True, slots=True)
class QueueChanged(Event):
    """A queue was created, or has another weight or quota."""

    queue: Queue


@dataclass(frozen=True, slots=True)
class DecisionMade(Event):
    """A policy's answer to the snapshot of `revision`; kept as a fact, so that a replay never asks the policy again.

    Where it is `partial`, jobs that the allocation does not name keep what they hold, and NOWHERE takes it away.
    """

    revision: int
    decision: Decision
    partial: bool = False
