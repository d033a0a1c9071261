"""What a shim knows of one node on which it runs replicas; `remote_launcher` keeps the connection."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.transport.channel import Channel, SecureLine, clock
from pollux.wire.live.node_messages import RunnerMessage, decode_runner_message

__all__ = ["NodeLink", "RemoteReplica"]


@dataclass(slots=True)
class RemoteReplica:
    """A process on the node, what takes its output, and its exit code once it has ended."""

    process: ReplicaProcess
    sink: Callable[[bytes], None]
    code: int | None = None


@dataclass(slots=True)
class NodeLink:
    """All there is with one node: a session with a runner there, over one connection after another.

    `stage` is how far the connection has come: "away", "connecting", "hello", "answer" or "open". `clear`: the number
    of the `ClearRequest` that has no answer yet; 0 for none. `gone`: what its engine said of its end, and `answers`:
    whether it has answered since.
    """

    node: str
    address: tuple[str, int]
    session: str
    channel: Channel[RunnerMessage] = field(default_factory=lambda: Channel(decode_runner_message))
    places: dict[str, RemoteReplica] = field(default_factory=dict)
    heard_at: float = field(default_factory=clock)
    peer: socket.socket | None = None
    line: SecureLine | None = None
    stage: str = "away"
    awaits_write: bool | None = None
    retry_at: float = 0.0
    give_up_at: float = 0.0
    ping_at: float = 0.0
    attached: bool = False
    lost: bool = False
    until: float = 0.0
    trouble: str = ""
    clear: int = 0
    is_clear: bool = True
    gone: str = ""
    answers: bool = False

    @property
    def has_living(self) -> bool:
        """Whether something may run there."""
        return any(place.code is None for place in self.places.values())

    @property
    def is_needed(self) -> bool:
        """Whether something may run there, or it is asked whether something is left."""
        return self.has_living or self.clear > 0
