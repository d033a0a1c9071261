"""The state of jobs, nodes and the service, for people and pages. Times are seconds since 1970 on its clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Eta", "JobStatus", "NodeStatus", "Plan", "QueueStatus", "ReasonStatus", "ServiceStatus"]


@dataclass(frozen=True, slots=True)
class Eta:
    """When a job is expected to end: on the GPUs it holds (None: none), and as an interval for what it may get."""

    low: float
    high: float
    current: float | None = None


@dataclass(frozen=True, slots=True)
class ReasonStatus:
    """Why a job has its GPUs: the code and numbers of the reason, a sentence made of them, and the `jobs` it names."""

    code: str
    at: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    next_step: str = ""
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One job. `progress` is a share from 0 to 1; `goodput` useful samples per second, `throughput` samples per second.

    `gpus` are those it holds now, `placement` where. `crashes` counts against `retries`; `restarts` are re-allocations.
    `resize_seconds` is the expected pause of the next one, `resize_kind` how it will be done (`live` or `restart`),
    `resize_costs` the median of its last pauses by kind. `outdated`: progress, batch and ETA are from before it got its
    present GPUs; its next report renews them. `fairness` is finish-time fairness at the moment of the answer; None if
    it is unknown.
    """

    id: str
    name: str
    state: str
    queue: str
    priority: str
    submitted_at: float
    min_gpus: int
    max_gpus: int
    gpus: int = 0
    placement: Mapping[str, int] = field(default_factory=dict)
    generation: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    restarts: int = 0
    crashes: int = 0
    retries: int = 0
    rigid: bool = False
    after: tuple[str, ...] = ()
    detail: str = ""
    batch_size: int | None = None
    local_batch: int | None = None
    accumulation: int | None = None
    learning_rate_factor: float | None = None
    throughput: float | None = None
    efficiency: float | None = None
    goodput: float | None = None
    noise_scale: float | None = None
    loss: float | None = None
    epoch: float | None = None
    progress: float | None = None
    eta: Eta | None = None
    reason: ReasonStatus | None = None
    resize_seconds: float | None = None
    resize_kind: str = ""
    resize_costs: Mapping[str, float] = field(default_factory=dict)
    checkpoint_age_seconds: float | None = None
    checkpoint_error: str = ""
    gpu_seconds: float = 0.0
    reported_at: float | None = None
    outdated: bool = False
    fairness: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What will happen to a job that is submitted now, by the policy's own answer.

    `gpus` 0: it waits, and `behind` names the jobs in its way. `low_gpus` to `high_gpus` is the predicted range. `note`
    is a hint for its submitter, such as that its queue is new; often empty.
    """

    job_id: str
    starts_now: bool
    gpus: int
    low_gpus: int
    high_gpus: int
    behind: tuple[str, ...] = ()
    eta: Eta | None = None
    text: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node: its GPUs (or CPU slots, `gpu_type` `cpu`), and how many each job holds.

    `set_aside` is the reason why the node takes nothing new; empty if the node is in use.
    """

    id: str
    gpus: int
    gpu_type: str
    used: int
    jobs: Mapping[str, int] = field(default_factory=dict)
    schedulable: bool = True
    set_aside: str = ""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue: its weight, its quota (None: none), and the GPUs that its jobs hold together."""

    name: str
    weight: float = 1.0
    gpu_quota: int | None = None
    used: int = 0
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The state of the service.

    `interval_seconds` is the length of a round, `at_stop` what happens to jobs when it stops: `stop` or `keep`.
    `warnings` are sentences about problems of the backend.
    """

    version: str
    policy: str
    trigger: str
    backend: str
    started_at: float
    now: float
    revision: int
    nodes: tuple[NodeStatus, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    jobs_by_state: Mapping[str, int] = field(default_factory=dict)
    last_decision_at: float | None = None
    decision_seconds: float | None = None
    interval_seconds: float | None = None
    at_stop: str = ""
    warnings: tuple[str, ...] = ()
