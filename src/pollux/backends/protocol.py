"""What a backend must do: start and stop the replicas of a job's generation, and say what happened to them."""

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
"""How a generation ended: by itself, well or not; for lack of memory; because it was told to; with its node or shim.

`refused`: it never began, since its places cannot be had: an engine lends them to others, or a node has just gone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Replicas of one job and generation: one process per GPU of the placement, all with the same command.

    `env` is added to the service's own environment; the backend adds torchrun's variables. Memory and CPUs are per
    GPU, 0 for not counted. `grace_seconds` lie between SIGTERM and SIGKILL. `live`: its replicas may change while they
    run, and get what they need for it.
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
    """Root of what backends tell; `at` in seconds since 1970."""

    at: float


@dataclass(frozen=True, slots=True)
class ReplicasStarted(BackendEvent):
    """All replicas of a generation are processes now; after a `resize`, all have taken their first step in it.

    `pause_seconds` is then how long training paused for it, and `kind` what it was ("grow", "shrink", "move",
    "recover"); None and empty for a start, or where nobody said. The scheduler hears of such a pause in no other way.
    """

    job_id: str
    generation: int
    pause_seconds: float | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ReplicasLost(BackendEvent):
    """These replicas of a generation are gone, or never came; the others wait to go on at `remaining` without them.

    Answered by a `resize` to that placement or by a `stop`; without an answer within seconds the generation ends.
    `refused`: nobody is gone, the others train on and wait for nobody; those that were to join have no places.
    `withdrawn`: the same, where they had places and did not come; it is answered as a loss is.
    """

    job_id: str
    generation: int
    replicas: tuple[int, ...]
    remaining: Placement
    detail: str = ""
    refused: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ReplicasEnded(BackendEvent):
    """No process of this generation is left; `detail` is one line for people, with the log's end where it helps."""

    job_id: str
    generation: int
    outcome: Outcome
    exits: tuple[Exit, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NodeUp(BackendEvent):
    """A node arrived, or changed."""

    node: Node


@dataclass(frozen=True, slots=True)
class NodeDown(BackendEvent):
    """A node is gone, with whatever ran there."""

    node_id: str


Listener = Callable[[BackendEvent], None]
"""Called from any thread, returns at once."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a backend has of one job: the newest generation it was given.

    `waiting`: accepted, its GPUs are not free yet; `running`: has processes; `stopping`: told to end;
    `ended`: no process left, `ended` tells how, kept until `forget`.
    """

    job_id: str
    generation: int
    state: Literal["waiting", "running", "stopping", "ended"]
    ended: ReplicasEnded | None = None


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of one replica's log and the offset after it; `at_end`: there is no more now."""

    text: str
    offset: int
    at_end: bool


class BackendCapabilities(Protocol):
    """What a backend may declare beyond starting and stopping replicas. Backends inherit the defaults from here."""

    options_class: ClassVar[type | None] = None
    """The frozen dataclass whose fields the constructor takes as keywords beside those that it names; None for none."""

    @property
    def head(self) -> str | None:
        """The address by which nodes reach this machine; None where all nodes are this machine."""
        return None

    @property
    def false_alarms(self) -> int | None:
        """How often a node or replica that was given up gave a sign of life later; None where that is not counted."""
        return None

    @property
    def notice_seconds(self) -> float | None:
        """How long before its end a node is left, so that jobs save; None where nodes have no known end."""
        return None

    @property
    def taken_back_seconds(self) -> float | None:
        """Notice that the engine gives before it kills what runs on a node; None where that is not known."""
        return None

    def warnings(self) -> tuple[str, ...]:
        """What is degraded now, a sentence each; returns at once."""
        return ()

    def refuses(self, folders: Sequence[str]) -> str:
        """Why a job with these folders cannot run on the nodes, with the remedy; empty where it can or may.

        The first folder is only read, the others are written to. May take seconds.
        """
        return ""

    def reports_go_to(self, url: str) -> None:
        """Hear which URL agents on the nodes report to, to warn about nodes that cannot reach it."""
        return

    def desire(self, num_nodes: int, awaited: bool = False) -> None:
        """Hear how many nodes would be used, `awaited` by a job that has none; backends that cannot scale ignore it."""
        return

    @classmethod
    def head_of(cls, options: Mapping[str, Any]) -> str | None:
        """What `head` of a backend with these options will be."""
        return None

    @classmethod
    def preview(cls, home: Path, **options: Any) -> str:
        """Exactly what a backend with these options would ask its engine for; empty where there is no engine."""
        return ""


class Backend(BackendCapabilities, Protocol):
    """Seven small methods beside start and close. All are idempotent and return without waiting for processes.

    Two attributes say what a change of a running job's replicas costs before it has reported one, in seconds:
    `restart_seconds` by ending and starting them, `live_seconds` in living processes.
    """

    restart_seconds: float
    live_seconds: float

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def healthy(self) -> bool:
        """Whether it does what it is asked; where not, the service says that it is not ready."""

    def start(self, listener: Listener) -> None:
        """Begin: find what still runs from before, and tell the listener of everything that happens from now on."""

    def inventory(self) -> tuple[Node, ...]:
        """The nodes there are now."""

    def submit(self, launch: Launch) -> None:
        """Start replicas once the earlier generation is gone and the GPUs are free; known (job, generation): no-op."""

    def resize(self, launch: Launch) -> None:
        """Bring a running job to another placement, as a new generation, in its living processes where that can be.

        Where it cannot, or fails on the way: as `stop` of what runs and `submit` of the launch would, or the generation
        ends as `lost`. Known (job, generation): no-op.
        """

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        """End all replicas of the job up to and including that generation; unknown or ended: no-op."""

    def running(self) -> tuple[Running, ...]:
        """Everything it has that was not forgotten."""

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of a replica's log over all generations, from `offset` on; a negative offset counts from the end."""

    def forget(self, job_id: str) -> None:
        """Drop what is kept of an ended job, but not its logs."""

    def close(self) -> None:
        """Let go; replicas keep running where the backend can find them again."""
