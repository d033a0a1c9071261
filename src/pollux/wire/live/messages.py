"""What the service and the shim of a job tell each other: one line of JSON for each message.

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
    """Where the daemons of other nodes listen, by node, and the secret (hexadecimal) by which they know us.

    `head` is the address by which nodes reach this machine. A node ends the replicas of a shim that it has not heard
    for `lease_seconds`; a node that was not heard for `lost_seconds`, which are more, counts as lost.
    """

    secret: str
    head: str
    nodes: Mapping[str, tuple[str, int]]
    lease_seconds: float
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """A generation as a shim is to start it: the variables and cores of every replica, and the places they hold.

    A place is a number on this machine, or `NODE/number` on a node of the `fleet`; `gpus` is the device behind a place.
    `live`: its replicas may change while they run; one that is silent for `hang_seconds` then counts as hung.
    `orphan_seconds`: the generation ends, with its grace, once no service has been connected to its shim for so long;
    None: it goes on.
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
    """Change what runs into this generation."""

    order: LaunchOrder


@dataclass(frozen=True, slots=True)
class StopRequest:
    """End what runs up to this generation."""

    generation: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class NodeGoneRequest:
    """The engine that lent the node says that it is gone."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """The shim is not needed any more, and ends once nothing runs."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Answer with the status. The shim answers every other request in the same way."""


# The shim to the service


@dataclass(frozen=True, slots=True)
class LostMessage:
    """These ranks of a generation are gone, or never came; `kept` are the places of the replicas that can go on.

    `withdrawn`: the change was given up before any replica paused, and nobody else is gone.
    """

    at: float
    generation: int
    replicas: tuple[int, ...]
    kept: tuple[str, ...]
    why: str
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class StartedMessage:
    """All replicas of a generation run; after a change, all have taken their first step and hold these `places`."""

    at: float
    generation: int
    places: tuple[str, ...] = ()
    pause: PauseReport | None = None


@dataclass(frozen=True, slots=True)
class StatusMessage:
    """What the shim has: its newest generation, whether that is starting or changing, its loss or how it ended.

    `warm`: the shim was forked with everything imported. `ended` is the record that is on disk, too. `pause`: what the
    change into that generation took, for a service that was not connected when it came about.
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
    """A generation has ended; `ended` is the record that is on disk, too."""

    ended: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AlarmMessage:
    """Something had been given up that was not gone: a node, or the `replica` of that rank."""

    at: float
    text: str
    replica: int | None = None


@dataclass(frozen=True, slots=True)
class NodeLeavingMessage:
    """What runs on the node is to leave it."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class NodeSilentMessage:
    """A node does not answer, and counts as lost for this job."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """So `many` connections of strangers were refused; the text says by what, who the last of them was, and why."""

    at: float
    many: int
    text: str


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
    """The message as a line."""
    return encode_tagged(message).encode() + b"\n"


def decode_message(line: bytes) -> Any:
    """The message of a line; `MalformedValue` for a line that this version has no message for."""
    message = decode_tagged(_CLASSES, line, MAX_MESSAGE_BYTES)
    if isinstance(message, StatusMessage) and message.version != PROTOCOL_VERSION:
        raise MalformedValue(f"it speaks version {message.version} of the protocol, and not version {PROTOCOL_VERSION}")
    return message
