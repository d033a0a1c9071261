"""The messages between the service and the process that speaks to Ray, each a line of JSON.

The service sends a `DriverOrder` first, and then requests; the driver answers with the `...Message` classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux.backends.ray.nodes import RayNode
from pollux.wire.live.codec import classes_by_name, decode_tagged, encode_tagged

__all__ = [
    "MAX_LINE_BYTES",
    "ConnectedMessage",
    "DesireNodes",
    "DriverMessage",
    "DriverOrder",
    "DriverRequest",
    "FailedMessage",
    "FreeClaims",
    "GrantedMessage",
    "HostGoneMessage",
    "HostMessage",
    "HostReport",
    "NodesMessage",
    "ReleaseHosts",
    "RetryClaims",
    "TakeClaims",
    "TroubleMessage",
    "UnreachableMessage",
    "WaitsMessage",
    "WellMessage",
    "decode_message",
    "decode_request",
    "encode_line",
]

MAX_LINE_BYTES = 1 << 26
"""The longest line that is read. The one with all nodes of a large cluster has some hundred kilobytes."""


# The service to the driver


@dataclass(frozen=True, slots=True)
class DesireNodes:
    """How many nodes to ask the autoscaler for; None where it is not used.

    `awaited`: a job without GPUs waits for them. `size`: the places of each, 0 for as many as the largest node has.
    """

    num_nodes: int | None = None
    awaited: bool = False
    size: int = 0


@dataclass(frozen=True, slots=True)
class DriverOrder:
    """The first line for a new driver: which cluster, how to start hosts, and the claims of the service.

    `secret`: given to hosts. `prefix`: the beginning of the names of the service's placement groups. `slots`: CPU slots
    of each node instead of its GPUs, or None. `with_gpus`: whether Ray's GPUs are real ones. `warm`: whether hosts
    import everything beforehand. `claims`: the name of the node by the name of the placement group.
    """

    secret: str
    prefix: str
    address: str = "auto"
    namespace: str = ""
    slots: int | None = None
    with_gpus: bool = True
    warm: bool = True
    claims: Mapping[str, str] = field(default_factory=dict)
    desired: DesireNodes = field(default_factory=DesireNodes)

    @property
    def needs_gpu_numbers(self) -> bool:
        """Whether it matters which GPU is behind a claim; to find out takes a process on the node."""
        return self.with_gpus and self.slots is None

    @property
    def bundle(self) -> dict[str, int]:
        """The resources of one place, in Ray's words."""
        return {"CPU": 1} if self.slots is not None else {"GPU": 1}


@dataclass(frozen=True, slots=True)
class TakeClaims:
    """Make a placement group for each of these claims: the name of the node by the name of the group."""

    claims: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FreeClaims:
    """Remove the placement groups of these claims."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetryClaims:
    """Wait for these claims as if they were new: places were given back on their nodes."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHosts:
    """Ask for no nodes, and let hosts end soon: the service ends, and no job runs."""


# The driver to the service


@dataclass(frozen=True, slots=True)
class ConnectedMessage:
    """The driver is connected to a cluster of this version of Ray."""

    version: str


@dataclass(frozen=True, slots=True)
class UnreachableMessage:
    """Ray cannot be reached, and the driver ends."""

    why: str


@dataclass(frozen=True, slots=True)
class WellMessage:
    """Ray has answered, and its nodes are the same."""


@dataclass(frozen=True, slots=True)
class TroubleMessage:
    """There is new trouble with the driver or its cluster, or none any more; `DriverClient` itself reports it."""


@dataclass(frozen=True, slots=True)
class NodesMessage:
    """All nodes to use, and those that Ray takes back, by name, with the reason."""

    nodes: tuple[RayNode, ...]
    leaving: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HostReport:
    """Where a node's host listens, and the GPUs that it was started with."""

    address: tuple[str, int]
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostMessage:
    """A node's host is up.

    `odd`: it was started with other options; `doubt`: its GPUs are in doubt. Both are sentences for people, or empty.
    """

    node: str
    report: HostReport
    odd: str = ""
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class HostGoneMessage:
    """A node's host has ended, or could not be started."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class GrantedMessage:
    """Ray has granted a claim, with this GPU of its node; None where it does not matter which."""

    claim: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True)
class WaitsMessage:
    """Ray has had nothing for a claim for some seconds."""

    claim: str


@dataclass(frozen=True, slots=True)
class FailedMessage:
    """Ray could not make a claim's group, or has lost it."""

    claim: str
    why: str


DriverRequest = TakeClaims | FreeClaims | RetryClaims | DesireNodes | ReleaseHosts
"""What the service sends after its `DriverOrder`."""

DriverMessage = (
    ConnectedMessage
    | UnreachableMessage
    | WellMessage
    | TroubleMessage
    | NodesMessage
    | HostMessage
    | HostGoneMessage
    | GrantedMessage
    | WaitsMessage
    | FailedMessage
)
"""What the driver sends."""

_REQUESTS = classes_by_name(DriverOrder | DriverRequest)
_MESSAGES = classes_by_name(DriverMessage)


def encode_line(message: DriverOrder | DriverRequest | DriverMessage) -> bytes:
    """The message as one line."""
    return encode_tagged(message).encode() + b"\n"


def decode_request(line: bytes) -> Any:
    """The order or request of a line; `MalformedValue` for any other line."""
    return decode_tagged(_REQUESTS, line, MAX_LINE_BYTES)


def decode_message(line: bytes) -> DriverMessage:
    """The driver's message of a line; `MalformedValue` for any other line."""
    message: DriverMessage = decode_tagged(_MESSAGES, line, MAX_LINE_BYTES)
    return message
