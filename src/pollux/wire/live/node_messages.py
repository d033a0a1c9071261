"""The messages to node daemons, and between the shim of a job and its runner there, over an authenticated channel.

Shims and the service send the `...Request` classes, daemons and runners the `...Message` classes. A session spans all
connections of a shim with a runner; a `key` names one replica's process in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pollux.wire.live import PROTOCOL_VERSION
from pollux.wire.live.codec import classes_by_name, decode_tagged
from pollux.wire.live.messages import MAX_MESSAGE_BYTES

__all__ = [
    "ClearMessage",
    "ClearRequest",
    "ConnectionHandover",
    "EndRunnerRequest",
    "ExitMessage",
    "ForkedMessage",
    "HelloMessage",
    "KillAllRequest",
    "KillRequest",
    "NodeNoticeMessage",
    "OutputMessage",
    "OverMemoryMessage",
    "PingRequest",
    "PongMessage",
    "ProvenRequest",
    "RunnerMessage",
    "RunnerRequest",
    "SeeRequest",
    "SeenMessage",
    "SessionGreeting",
    "SessionRequest",
    "StartReplicaRequest",
    "SweepRequest",
    "SweptMessage",
    "TerminateRequest",
    "decode_daemon_request",
    "decode_runner_message",
    "decode_runner_request",
]


# The first messages of a connection to a daemon


@dataclass(frozen=True, slots=True)
class HelloMessage:
    """What a daemon says first; `nonce` is its challenge."""

    nonce: str
    encrypts: bool
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class ProvenRequest:
    """The answer to a `HelloMessage`: a request to the daemon as text, and the proof that it is authentic."""

    nonce: str
    request: str
    proof: str


@dataclass(frozen=True, slots=True)
class SeeRequest:
    """Answer which of these files and folders exist on `node` (empty: on any), with a `SeenMessage`."""

    paths: tuple[str, ...] = ()
    node: str = ""


@dataclass(frozen=True, slots=True)
class SeenMessage:
    """Whether each of the paths exists, in their order."""

    seen: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The first message of a shim to the daemon of `node`: continue this session; the shim has seen that many messages.

    A runner ends its replicas if the shim confirms nothing for `lease` seconds.
    """

    session: str
    seen: int
    lease: float
    node: str


@dataclass(frozen=True, slots=True)
class SessionGreeting:
    """The runner's answer: whether it knows this session, how many messages it has seen, and its daemon's start."""

    known: bool
    seen: int
    boot: str


@dataclass(frozen=True, slots=True)
class ConnectionHandover:
    """What a daemon tells a runner of a connection that it hands over: its key, its other side, and the session."""

    key: str
    where: str
    session: SessionRequest


# The shim to the runner


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Answer with a `PongMessage`."""


@dataclass(frozen=True, slots=True)
class StartReplicaRequest:
    """Start a replica; `environ` is added to the node's own. `sent_at`: the sender's clock, in seconds since 1970."""

    key: str
    argv: tuple[str, ...]
    workdir: str
    environ: Mapping[str, str]
    cores: tuple[int, ...]
    path_was_set: bool
    memory_bytes: float
    sent_at: float


@dataclass(frozen=True, slots=True)
class TerminateRequest:
    """Send SIGTERM to the process `alone`, or also to the processes that it started."""

    key: str
    alone: bool


@dataclass(frozen=True, slots=True)
class KillRequest:
    """Send SIGKILL to the process and its session."""

    key: str


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """End the processes that an ended replica has left behind."""

    key: str


@dataclass(frozen=True, slots=True)
class KillAllRequest:
    """Send SIGKILL to every process of the job on the node."""


@dataclass(frozen=True, slots=True)
class ClearRequest:
    """Answer with a `ClearMessage` once no process of the job is left on the node; `kill`: kill them now."""

    number: int
    kill: bool


@dataclass(frozen=True, slots=True)
class EndRunnerRequest:
    """End the runner."""


# The runner to the shim


@dataclass(frozen=True, slots=True)
class PongMessage:
    """The answer to a ping."""


@dataclass(frozen=True, slots=True)
class NodeNoticeMessage:
    """The node's engine has asked the processes on the node to end."""


@dataclass(frozen=True, slots=True)
class ForkedMessage:
    """A replica's process has started."""

    key: str
    pid: int


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A piece of a replica's output."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ExitMessage:
    """A replica has ended, with an exit code or minus a signal's number; `asked`: it ended on request.

    `lacks_memory`: the kernel of the node has killed processes because memory ran out.
    """

    key: str
    code: int
    asked: bool
    lacks_memory: bool


@dataclass(frozen=True, slots=True)
class OverMemoryMessage:
    """A replica uses more memory than its limit."""

    key: str
    used_bytes: float


@dataclass(frozen=True, slots=True)
class SweptMessage:
    """No process of a replica is left."""

    key: str


@dataclass(frozen=True, slots=True)
class ClearMessage:
    """The answer to the `ClearRequest` of that number: no process of the job is left."""

    number: int


RunnerRequest = (
    PingRequest
    | StartReplicaRequest
    | TerminateRequest
    | KillRequest
    | SweepRequest
    | KillAllRequest
    | ClearRequest
    | EndRunnerRequest
)
"""What the shim sends."""

RunnerMessage = (
    PongMessage
    | NodeNoticeMessage
    | ForkedMessage
    | OutputMessage
    | ExitMessage
    | OverMemoryMessage
    | SweptMessage
    | ClearMessage
)
"""What the runner sends."""

_DAEMON_REQUESTS = classes_by_name(SeeRequest | SessionRequest)
_REQUESTS = classes_by_name(RunnerRequest)
_MESSAGES = classes_by_name(RunnerMessage)


def decode_daemon_request(text: str) -> SeeRequest | SessionRequest:
    """The request to a daemon of a text; `MalformedValue` if this version has no such request."""
    request: SeeRequest | SessionRequest = decode_tagged(_DAEMON_REQUESTS, text)
    return request


def decode_runner_request(text: str) -> RunnerRequest:
    """The request of a text; `MalformedValue` if this version has no such request."""
    request: RunnerRequest = decode_tagged(_REQUESTS, text, MAX_MESSAGE_BYTES)
    return request


def decode_runner_message(text: str) -> RunnerMessage:
    """The message of a text; `MalformedValue` if this version has no such message."""
    message: RunnerMessage = decode_tagged(_MESSAGES, text, MAX_MESSAGE_BYTES)
    return message
