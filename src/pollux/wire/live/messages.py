"""The messages between the service and the shim of a job, and of the server that forks shims, each as JSON.

The service sends the `...Request` classes, the shim the `...Message` classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux.wire.live import PROTOCOL_VERSION
from pollux.wire.live.codec import MalformedValue, classes_by_name, decode_tagged, encode_tagged
from pollux.wire.live.heartbeat import PauseReport

__all__ = [
    "MAX_MESSAGE_BYTES",
    "AlarmMessage",
    "EndedMessage",
    "FleetAccess",
    "ForkShimRequest",
    "ForkserverMessage",
    "LaunchOrder",
    "LaunchRequest",
    "LostMessage",
    "NodeGoneRequest",
    "NodeLeavingMessage",
    "NodeSilentMessage",
    "RefusedMessage",
    "ReleaseRequest",
    "ResizeRequest",
    "ShimMessage",
    "ShimRequest",
    "StartedMessage",
    "StatusMessage",
    "StatusRequest",
    "StopRequest",
    "decode_message",
    "encode_message",
]

MAX_MESSAGE_BYTES = 64 << 20
"""The longest message that is read. A launch names the variables of every replica."""


@dataclass(frozen=True, slots=True)
class FleetAccess:
    """The addresses of node daemons, by node, and the secret (hexadecimal) with which connections are authenticated.

    `head` is the address at which nodes reach this machine. A node ends the replicas of a shim that has been silent for
    `lease_seconds`; a node that has been silent for `lost_seconds`, which is longer, counts as lost.
    """

    secret: str
    head: str
    nodes: Mapping[str, tuple[str, int]]
    lease_seconds: float
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """A generation for a shim to start: the variables and cores of each replica, and their slots (`places`).

    A slot is a number on this machine, or `NODE/number` on a node of the `fleet`; `gpus` maps slots to devices. `live`:
    live resizes are allowed, and a replica that is silent for `hang_seconds` counts as hung. `orphan_seconds`: the
    generation is stopped, with its grace, if no service is connected to its shim for this time; None: it goes on.
    """

    job_id: str
    generation: int
    argv: tuple[str, ...]
    workdir: str
    environ: Mapping[str, str]
    replicas: tuple[Mapping[str, str], ...]
    cores: tuple[tuple[int, ...], ...]
    places: tuple[str, ...]
    run_id: str
    path_was_set: bool
    grace_seconds: float
    memory_bytes: float
    logs: str
    log_cap_bytes: int
    live: bool = False
    hang_seconds: float = 30.0
    gpus: Mapping[str, int] = field(default_factory=dict)
    fleet: FleetAccess | None = None
    orphan_seconds: float | None = None


# The service to the shim


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Start this generation."""

    order: LaunchOrder


@dataclass(frozen=True, slots=True)
class ResizeRequest:
    """Resize the running generation into this one."""

    order: LaunchOrder


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Stop all generations up to this one."""

    generation: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class NodeGoneRequest:
    """The node's engine reports that the node is gone."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """End the shim once nothing runs."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Answer with the status. The shim answers every other request in the same way."""


# The shim to the service


@dataclass(frozen=True, slots=True)
class LostMessage:
    """These ranks of a generation are lost, or never joined; `kept` are the slots of the replicas that can go on.

    `withdrawn`: the resize was withdrawn before any replica paused, and no other replica is lost.
    """

    at: float
    generation: int
    replicas: tuple[int, ...]
    kept: tuple[str, ...]
    why: str
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class StartedMessage:
    """All replicas of a generation run; after a resize, all have taken their first step and hold these `places`."""

    at: float
    generation: int
    places: tuple[str, ...] = ()
    pause: PauseReport | None = None


@dataclass(frozen=True, slots=True)
class StatusMessage:
    """The shim's state: its newest generation, whether it is starting or resizing, its loss or its end.

    `warm`: the shim was forked with everything imported. `ended` is the record of the end, which is also on disk.
    `pause` is the pause of the resize to this generation, for a service that was not connected then.
    """

    warm: bool
    generation: int | None
    version: int = PROTOCOL_VERSION
    moving: bool = False
    lost: LostMessage | None = None
    ended: Mapping[str, Any] | None = None
    pause: PauseReport | None = None


@dataclass(frozen=True, slots=True)
class EndedMessage:
    """A generation has ended; `ended` is the record of it, which is also on disk."""

    ended: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AlarmMessage:
    """A node, or the `replica` of that rank, was counted as lost by mistake."""

    at: float
    text: str
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class NodeLeavingMessage:
    """Replicas must leave the node."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class NodeSilentMessage:
    """A node does not answer, and counts as lost for this job."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """`many` connections of strangers were refused; the text names what refused them, the last stranger, and why."""

    at: float
    many: int
    text: str


# The service and the server that forks shims


@dataclass(frozen=True, slots=True)
class ForkserverMessage:
    """The fork server has imported everything; `ready`: it can fork safely."""

    ready: bool


@dataclass(frozen=True, slots=True)
class ForkShimRequest:
    """Fork a shim for this folder; its listener, its lock and the file for its output come along."""

    folder: str


ShimRequest = LaunchRequest | ResizeRequest | StopRequest | NodeGoneRequest | ReleaseRequest | StatusRequest
"""What the service sends."""

ShimMessage = (
    StatusMessage
    | StartedMessage
    | LostMessage
    | EndedMessage
    | AlarmMessage
    | NodeLeavingMessage
    | NodeSilentMessage
    | RefusedMessage
)
"""What the shim sends."""

_CLASSES = classes_by_name(ShimRequest | ShimMessage)


def encode_message(message: ShimRequest | ShimMessage) -> bytes:
    """The message as one line."""
    return encode_tagged(message).encode() + b"\n"


def decode_message(line: bytes) -> Any:
    """The message of a line; `MalformedValue` if this version has no such message."""
    message = decode_tagged(_CLASSES, line, MAX_MESSAGE_BYTES)
    if isinstance(message, StatusMessage) and message.version != PROTOCOL_VERSION:
        raise MalformedValue(
            f"the shim speaks version {message.version} of the protocol, this service version {PROTOCOL_VERSION}: "
            "install the same Pollux for both"
        )
    return message
