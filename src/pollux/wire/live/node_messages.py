"""What the shim of a job and the job's runner on another node tell each other, over an authenticated channel.

The shim sends the `...Request` classes, the runner the `...Message` classes. A `key` names one replica's process in a
session, which is all that one shim and one runner have with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pollux.wire.live.codec import classes_by_name, decode_tagged
from pollux.wire.live.messages import MAX_MESSAGE_BYTES

__all__ = [
    "ClearMessage",
    "ClearRequest",
    "EndRunnerRequest",
    "ExitMessage",
    "ForkedMessage",
    "KillAllRequest",
    "KillRequest",
    "NodeNoticeMessage",
    "OutputMessage",
    "OverMemoryMessage",
    "PingRequest",
    "PongMessage",
    "RunnerMessage",
    "RunnerRequest",
    "SessionGreeting",
    "SessionRequest",
    "StartReplicaRequest",
    "SweepRequest",
    "SweptMessage",
    "TerminateRequest",
    "decode_runner_message",
    "decode_runner_request",
]


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """The first words of a shim, to a node's daemon: go on with this session, of which it has `seen` so many messages.

    A runner that the shim has not confirmed anything to for `lease` seconds ends its replicas.
    """

    session: str
    seen: int
    lease: float


@dataclass(frozen=True, slots=True)
class SessionGreeting:
    """The runner's answer: whether it had this session before, how many messages it has seen, and its daemon's life."""

    known: bool
    seen: int
    boot: str


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
    """SIGTERM, to the process `alone` or to all that it started."""

    key: str
    alone: bool


@dataclass(frozen=True, slots=True)
class KillRequest:
    """SIGKILL to the process and all of its session."""

    key: str


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """End what a process that has ended left behind."""

    key: str


@dataclass(frozen=True, slots=True)
class KillAllRequest:
    """SIGKILL to every process of the job on the node."""


@dataclass(frozen=True, slots=True)
class ClearRequest:
    """Answer with a `ClearMessage` once no process of the job is left there; `kill`: what is left ends now."""

    number: int
    kill: bool


@dataclass(frozen=True, slots=True)
class EndRunnerRequest:
    """The runner is not needed any more."""


# The runner to the shim


@dataclass(frozen=True, slots=True)
class PongMessage:
    """The answer to a ping."""


@dataclass(frozen=True, slots=True)
class NodeNoticeMessage:
    """The engine that lent the node has asked what runs there to end."""


@dataclass(frozen=True, slots=True)
class ForkedMessage:
    """A replica is a process now."""

    key: str
    pid: int


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A piece of what a replica wrote."""

    key: str
    data: bytes


@dataclass(frozen=True, slots=True)
class ExitMessage:
    """A replica has ended, with an exit code or minus a signal's number; `asked`: it was told to while it ran.

    `lacks_memory`: the kernel of the node has ended processes for lack of memory.
    """

    key: str
    code: int
    asked: bool
    lacks_memory: bool


@dataclass(frozen=True, slots=True)
class OverMemoryMessage:
    """A replica uses so much memory, which is more than its limit."""

    key: str
    used_bytes: float


@dataclass(frozen=True, slots=True)
class SweptMessage:
    """Nothing is left of a replica."""

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

_REQUESTS = classes_by_name(RunnerRequest)
_MESSAGES = classes_by_name(RunnerMessage)


def decode_runner_request(text: str) -> RunnerRequest:
    """The request of a text; `MalformedValue` for a text that this version has no request for."""
    request: RunnerRequest = decode_tagged(_REQUESTS, text, MAX_MESSAGE_BYTES)
    return request


def decode_runner_message(text: str) -> RunnerMessage:
    """The message of a text; `MalformedValue` for a text that this version has no message for."""
    message: RunnerMessage = decode_tagged(_MESSAGES, text, MAX_MESSAGE_BYTES)
    return message
