"""The state of a shim's connection to one node, and its replicas there; `remote_launcher` changes it."""

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
    """A process on the node, the function that takes its output, and its exit code once it has ended."""

    process: ReplicaProcess
    sink: Callable[[bytes], None]
    code: int | None = None


@dataclass(slots=True)
class NodeLink:
    """A session with the job runner on one node, over one connection after another.

    `stage` is the stage of the connection: "away", "connecting", "hello", "answer" or "open". `clear`: the number of
    the `ClearRequest` that has no answer yet; 0 for none. `gone`: why the engine says that the node is gone, empty
    where it does not; `answers`: whether the node has answered since then.
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
        """Whether a process may run on the node."""
        return any(place.code is None for place in self.places.values())

    @property
    def is_needed(self) -> bool:
        """Whether a process may run on the node, or the runner has been asked whether one is left."""
        return self.has_living or self.clear > 0
