"""What a backend must do: start and stop the replicas of a job's generation, and report what happened to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pollux.core import Node, Placement

__all__ = [
    "Backend",
    "BackendCapabilities",
    "BackendEvent",
    "Exit",
    "JobBackendEvent",
    "Launch",
    "Listener",
    "LogChunk",
    "NodeDown",
    "NodeUp",
    "Outcome",
    "ReplicasEnded",
    "ReplicasLost",
    "ReplicasStarted",
    "Running",
]

Outcome = Literal["succeeded", "crashed", "out-of-memory", "stopped", "lost", "refused"]
"""How a generation ended. `succeeded` and `crashed`: by itself. `stopped`: on an order. `lost`: with its node or shim.

`refused`: it never started, because its GPUs are not available: the engine lent them to others, or a node has gone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Replicas of one job and generation: one process per GPU of the placement, all with the same command.

    `env` is added to the service's own environment; the backend adds torchrun's variables. Memory and CPUs are per
    GPU; 0 means no limit. `grace_seconds` pass between SIGTERM and SIGKILL. `live`: replicas can join and leave while
    the job runs.
    """

    job_id: str
    generation: int
    placement: Placement
    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    grace_seconds: float = 60.0
    memory_bytes_per_gpu: float = 0.0
    cpus_per_gpu: float = 0.0
    live: bool = False


@dataclass(frozen=True, slots=True)
class Exit:
    """How one replica ended: exit code, or minus the signal's number; `at` in seconds since 1970."""

    replica: int
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class BackendEvent:
    """Base class of the events that a backend reports; `at` in seconds since 1970."""

    at: float


@dataclass(frozen=True, slots=True)
class JobBackendEvent(BackendEvent):
    """Base class of the events about the replicas of one job's generation."""

    job_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class ReplicasStarted(JobBackendEvent):
    """All replicas of a generation are processes now; after a live resize, all have taken their first step in it.

    For a live resize `pause_seconds` says how long training paused, and `kind` is "grow", "shrink", "move" or
    "recover". For a start, or where the replicas did not report the pause, they are None and empty. The scheduler
    learns the pause from this event only.
    """

    pause_seconds: float | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ReplicasLost(JobBackendEvent):
    """These replicas of a generation have ended, or never started; the others wait, and can go on at `remaining`.

    The answer is a `resize` to that placement or a `stop`; without an answer within seconds the generation ends.
    `refused`: no replica has ended and none waits, but there are no GPUs for the replicas that were to join.
    `withdrawn`: the replicas that were to join had GPUs and did not start; the answer is the same as to a loss.
    """

    replicas: tuple[int, ...]
    remaining: Placement
    detail: str = ""
    refused: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReplicasEnded(JobBackendEvent):
    """No process of this generation is left; `detail` is one line for people, with the end of the log if it helps."""

    outcome: Outcome
    exits: tuple[Exit, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NodeUp(BackendEvent):
    """A node arrived, or changed."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeDown(BackendEvent):
    """A node is gone, and everything that ran there has ended."""

    node_id: str


Listener = Callable[[BackendEvent], None]
"""Takes an event. It is called from any thread, and returns at once."""


@dataclass(frozen=True, slots=True)
class Running:
    """The newest generation of one job, as the backend was given it.

    `waiting`: accepted, but its GPUs are not free yet; `running`: has processes; `stopping`: was told to end;
    `ended`: no process is left. The field `ended` says how it ended; it is kept until `forget`.
    """

    job_id: str
    generation: int
    state: Literal["waiting", "running", "stopping", "ended"]
    ended: ReplicasEnded | None = None


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of one replica's log and the offset after it; `at_end`: nothing more has been written yet."""

    text: str
    offset: int
    at_end: bool


class BackendCapabilities(Protocol):
    """What a backend may declare beyond starting and stopping replicas. Backends inherit the defaults from here."""

    options_class: ClassVar[type | None] = None
    """The frozen dataclass whose fields are further keywords of the constructor; None where there are none."""

    @property
    def head(self) -> str | None:
        """The address by which nodes reach this machine; None where all nodes are this machine."""
        return None

    @property
    def false_alarms(self) -> int | None:
        """How many nodes or replicas answered after they had been given up; None where that is not counted."""
        return None

    @property
    def refusals(self) -> int | None:
        """How many connections from strangers the jobs' processes refused; None where that is not counted."""
        return None

    @property
    def notice_seconds(self) -> float | None:
        """How long before a node's end jobs leave it, to have time to save; None where its end is not known."""
        return None

    @property
    def taken_back_seconds(self) -> float | None:
        """The notice that the engine gives before it kills the processes on a node; None where that is not known."""
        return None

    def ran_seconds(self, job_id: str, generation: int) -> float | None:
        """How long the replicas of a generation have run, as measured by their watcher; None where it is not measured.

        The count goes on over restarts of the service, and ends with the generation, its shim or its machine.
        """
        return None

    def warnings(self) -> tuple[str, ...]:
        """One sentence for each thing that does not work fully now; returns at once."""
        return ()

    def refuses(self, folders: Sequence[str]) -> str:
        """Why a job with these folders cannot run on the nodes, with the remedy; empty where no reason is known.

        The job only reads the first folder, and writes to the others. The check may take seconds.
        """
        return ""

    def reports_go_to(self, url: str) -> None:
        """Note the URL that agents on the nodes report to, and warn about nodes that cannot reach it."""
        return

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Note how many nodes could be used; `awaited`: a job without GPUs waits for some. Most backends ignore it."""
        return

    @classmethod
    def head_of(cls, options: Mapping[str, Any]) -> str | None:
        """What `head` of a backend with these options will be."""
        return None

    @classmethod
    def missing(cls) -> str:
        """What is missing for this backend on this machine, and how to get it; empty where it can be used."""
        return ""

    @classmethod
    def preview(cls, home: Path, **options: Any) -> str:
        """The exact request that a backend with these options would send to its engine; empty without an engine."""
        return ""


class Backend(BackendCapabilities, Protocol):
    """Starts, resizes and stops jobs. All methods are idempotent and return without waiting for processes.

    Two attributes give the expected cost of a resize in seconds, for jobs that have not reported one yet:
    `restart_seconds` for a restart, `live_seconds` for a live resize.
    """

    restart_seconds: float
    live_seconds: float

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def healthy(self) -> bool:
        """Whether the backend can do its work; where it cannot, the service reports that it is not ready."""

    def start(self, listener: Listener) -> None:
        """Find the jobs that an earlier service left running, and call the listener for every event from now on."""

    def inventory(self) -> tuple[Node, ...]:
        """The nodes that jobs can be placed on now."""

    def submit(self, launch: Launch) -> None:
        """Start replicas once the earlier generation has ended and GPUs are free; known (job, generation): no-op."""

    def resize(self, launch: Launch) -> None:
        """Bring a running job to another placement, as a new generation: by a live resize where that is possible.

        Otherwise the backend stops the job and submits the launch. A live resize that fails may also end the generation
        as `lost`. Known (job, generation): no-op.
        """

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End all replicas of the job up to and including that generation; unknown or ended: no-op."""

    def running(self) -> tuple[Running, ...]:
        """Every job that the backend knows and that was not forgotten."""

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of a replica's log over all generations, from `offset` on; a negative offset counts from the end."""

    def forget(self, job_id: str) -> None:
        """Remove the records of an ended job, but not its logs."""

    def close(self) -> None:
        """Release threads and files; replicas keep running where the backend can find them again."""
