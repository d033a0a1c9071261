"""Starts and ends replicas on other machines, through the job runners of the nodes.

No method waits: the shim's loop serves the connections, which are made again when they break. A node that is silent for
too long (`keep_connections`) is lost, with all replicas of the job there: a silent node is noticed here, on any engine.
Other signs of a lost node: `fleet/node_watch`.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.backends.nodes.slot import Slot
from pollux.backends.process.fork_replica import ReplicaStart
from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.shim.node_link import NodeLink, RemoteReplica
from pollux.backends.transport import channel as channel_module
from pollux.backends.transport.channel import SecureLine, clock
from pollux.core.errors import BackendFailed
from pollux.wire.live.codec import MalformedValue, from_plain
from pollux.wire.live.messages import FleetAccess
from pollux.wire.live.node_messages import (
    ClearMessage,
    ClearRequest,
    EndRunnerRequest,
    ExitMessage,
    ForkedMessage,
    KillAllRequest,
    KillRequest,
    NodeNoticeMessage,
    OutputMessage,
    OverMemoryMessage,
    PingRequest,
    PongMessage,
    RunnerMessage,
    SessionGreeting,
    SessionRequest,
    StartReplicaRequest,
    SweepRequest,
    SweptMessage,
    TerminateRequest,
)

__all__ = ["NodeLeaving", "NodeLoss", "RemoteExit", "RemoteLauncher"]

_PING_SECONDS = 1.0
_RETRY_SECONDS = 0.25
_CONNECT_SECONDS = 5.0
# How long to listen for a node that was given up, to count a false alarm if it answers.
_GHOST_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RemoteExit:
    """A replica has ended; `asked`: it was told to end while it ran."""

    process: ReplicaProcess
    code: int
    asked: bool


@dataclass(frozen=True, slots=True)
class NodeLoss:
    """These processes are lost with their node; `silent`: because the node did not answer."""

    processes: tuple[ReplicaProcess, ...]
    node: str
    why: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The engine takes this node back, and its replicas have to leave it.

    `is_ending`: the engine has sent them SIGTERM, so that they have little time. Otherwise the engine says that the
    node is gone, but it still answers.
    """

    node: str
    why: str
    is_ending: bool


class RemoteLauncher:
    """The replicas of one job on many nodes; `events` holds what happened since the shim last emptied it.

    `loop` is the shim's; the shim calls `keep_connections` by the time `due`.
    """

    sweep_seconds = 1.0

    def __init__(self, fleet: FleetAccess, loop: SelectLoop) -> None:
        self.events: list[RemoteExit | NodeLoss | NodeLeaving] = []
        self.false_alarms: list[str] = []
        self.session = secrets.token_hex(8)
        self._fleet = fleet
        self._loop = loop
        self._links: dict[str, NodeLink] = {}
        self._ghosts: list[NodeLink] = []
        self._count = 0
        self._lacks_memory = False
        self._over_memory: dict[str, float] = {}

    def update_access(self, fleet: FleetAccess) -> None:
        """Replace the addresses of the node daemons."""
        self._fleet = fleet

    @property
    def lacks_memory(self) -> bool:
        """Whether a node's kernel has ended processes for lack of memory."""
        return self._lacks_memory

    # What a generation asks for

    def start(
        self, start: ReplicaStart, place: str, memory_bytes: float, sink: Callable[[bytes], None]
    ) -> ReplicaProcess:
        """Have the runner on the node fork the process; on an unknown node the replica is lost at once."""
        slot = Slot.read(place)
        node = slot.node
        self._count += 1
        process = ReplicaProcess(key=str(self._count), node=node, up=False)
        if node not in self._fleet.nodes:
            why = f"node '{slot.real_node}' is gone"
            sink(f"pollux: {why}\n".encode())
            self.events.append(NodeLoss((process,), node, why))
            return process
        link = self._link(node)
        link.places[process.key] = RemoteReplica(process, sink)
        link.is_clear = False
        link.channel.send(
            StartReplicaRequest(
                process.key,
                start.argv,
                start.workdir,
                start.environ,
                start.cores,
                start.path_was_set,
                memory_bytes,
                time.time(),
            )
        )
        return process

    def _link(self, node: str) -> NodeLink:
        link = self._links.get(node)
        address = self._fleet.nodes[node]
        if link is not None and link.address != address and not link.has_living:
            # A new daemon: the session with the old one is over.
            self._leave(link)
            link = None
        if link is None:
            self._count += 1
            link = self._links[node] = NodeLink(node, address, f"{self.session}-{self._count}")
            self._connect(link)
        return link

    def _tell(self, process: ReplicaProcess, request: TerminateRequest | KillRequest | SweepRequest) -> bool:
        link = self._links.get(process.node)
        place = None if link is None else link.places.get(process.key)
        if link is None or place is None:
            return False
        link.channel.send(request)
        return place.code is None

    def terminate(self, process: ReplicaProcess, alone: bool) -> bool:
        """SIGTERM on its node; whether the process ran, as far as is known: its exit message says more."""
        return self._tell(process, TerminateRequest(process.key, alone))

    def kill(self, process: ReplicaProcess) -> None:
        """SIGKILL on its node."""
        self._tell(process, KillRequest(process.key))

    def sweep(self, process: ReplicaProcess) -> None:
        """End the processes that it left behind on its node."""
        self._tell(process, SweepRequest(process.key))

    def kill_all(self) -> None:
        """SIGKILL to all processes of the job on all nodes."""
        for link in self._links.values():
            if not link.is_clear:
                link.channel.send(KillAllRequest())

    def is_clear(self, kill: bool) -> bool:
        """Whether every node has reported that no process of the job is left; asks those that have not."""
        for link in self._links.values():
            wanted = 2 if kill else 1
            if not link.is_clear and link.clear != wanted:
                link.clear = wanted
                link.channel.send(ClearRequest(wanted, kill))
        return all(link.is_clear for link in self._links.values())

    def over_memory(self, processes: Mapping[int, ReplicaProcess], limit: float) -> tuple[int, float] | None:
        """The first excess that a node has reported: job runners check by themselves."""
        for number, process in processes.items():
            used = self._over_memory.get(process.key)
            if used is not None:
                return number, used
        return None

    # What the shim's loop does

    def due(self) -> float | None:
        """Seconds until `keep_connections` must be called; None: only when something happens."""
        now = clock()
        times = [self._due(link, now) for link in (*self._links.values(), *self._ghosts)]
        return max(0.0, min(times) - now) if times else None

    def _due(self, link: NodeLink, now: float) -> float:
        times = [link.retry_at if link.stage == "away" else link.ping_at if link.stage == "open" else link.give_up_at]
        if link.is_needed and not link.lost:
            times.append(link.heard_at + self._fleet.lost_seconds)
        return min(times)

    def keep_connections(self) -> None:
        """Ping, connect again, and give up nodes that are silent."""
        now = clock()
        for link in [*self._links.values()]:
            self._keep_up(link, now)
            if link.is_needed and now - link.heard_at >= self._fleet.lost_seconds:
                trouble = f" ({link.trouble})" if link.trouble else ""
                why = f"node '{link.node}' is lost: no answer for {now - link.heard_at:.0f} s{trouble}"
                self._lose(link, why, silent=True)
                link.until = now + _GHOST_SECONDS
                self._ghosts.append(link)
        for ghost in [*self._ghosts]:
            self._keep_up(ghost, now)
            if now >= ghost.until:
                self._leave(ghost)

    def _keep_up(self, link: NodeLink, now: float) -> None:
        if link.stage == "away" and now >= link.retry_at:
            self._connect(link)
        elif link.stage == "open" and now >= link.ping_at:
            link.ping_at = now + min(_PING_SECONDS, self._fleet.lease_seconds / 5)
            link.channel.send(PingRequest())
        elif link.stage in ("connecting", "hello", "answer") and now >= link.give_up_at:
            self._broken(link, "no connection")
        self._watch(link)

    def node_is_gone(self, node: str, why: str) -> None:
        """Note that the engine calls a node gone. Its replicas are lost once nothing listens there, or it is silent.

        An engine may be wrong, or may announce the end while replicas still save: a node that answers is reported as
        `NodeLeaving`.
        """
        link = self._links.get(node)
        if link is not None:
            link.gone, link.answers, link.ping_at = why, False, clock()

    def _lose(self, link: NodeLink, why: str, silent: bool = False) -> None:
        living = tuple(place.process for place in link.places.values() if place.code is None)
        link.lost = True
        link.places.clear()
        if self._links.get(link.node) is link:
            del self._links[link.node]
        if living:
            self.events.append(NodeLoss(living, link.node, why, silent))

    def release(self) -> None:
        """End the runners and close all connections: no replica runs any more."""
        for link in [*self._links.values(), *self._ghosts]:
            if link.stage == "open":
                link.channel.send(EndRunnerRequest())
            self._leave(link)

    def _leave(self, link: NodeLink) -> None:
        if link in self._ghosts:
            self._ghosts.remove(link)
        if self._links.get(link.node) is link:
            del self._links[link.node]
        self._disconnect(link)

    def close_in_fork(self) -> None:
        """Close the copies of the sockets in a forked process."""
        for link in (*self._links.values(), *self._ghosts):
            if link.peer is not None:
                link.peer.close()

    # Connections

    def _connect(self, link: NodeLink) -> None:
        now = clock()
        link.retry_at, link.give_up_at = now + _RETRY_SECONDS, now + _CONNECT_SECONDS
        try:
            family = socket.AF_INET6 if ":" in link.address[0] else socket.AF_INET
            link.peer = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            code = link.peer.connect_ex(link.address)
        except OSError as error:
            self._broken(link, error.strerror or "")
            return
        if code not in (0, errno.EINPROGRESS):
            self._unreached(link, code)
            return
        link.stage, link.awaits_write = "connecting", True
        self._loop.watch(link.peer, lambda: self._ready(link), read=False, write=True)

    def _unreached(self, link: NodeLink, code: int) -> None:
        """Handle a failed connection: a node that the engine calls gone, and where nothing listens, is lost."""
        if link.gone and code == errno.ECONNREFUSED and not link.lost:
            self._lose(link, link.gone)
            self._leave(link)
        else:
            self._broken(link, os.strerror(code))

    def _broken(self, link: NodeLink, why: str) -> None:
        link.trouble = why or link.trouble
        self._disconnect(link)
        link.retry_at = clock() + _RETRY_SECONDS

    def _disconnect(self, link: NodeLink) -> None:
        if link.peer is not None:
            self._loop.unwatch(link.peer)
            link.peer.close()
        link.channel.detach()
        link.peer, link.line, link.stage, link.awaits_write = None, None, "away", None

    def _ready(self, link: NodeLink) -> None:
        if link.peer is None:
            return
        try:
            if link.stage == "connecting":
                code = link.peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._unreached(link, code)
                    return
                link.line = SecureLine(link.peer, f"{link.address[0]}:{link.address[1]}")
                link.stage = "hello"
            elif link.line is not None:
                link.line.flush()
                self._hear(link, link.line)
        except (BackendFailed, MalformedValue) as error:
            self._broken(link, str(error))
            return
        if link.line is not None and link.line.broken:
            self._broken(link, "its host closed the connection" if link.stage != "open" else "the connection broke")
        self._watch(link)

    def _watch(self, link: NodeLink) -> None:
        if link.line is None or link.peer is None:
            return
        if link.line.broken:
            self._broken(link, "the connection broke")
            return
        if link.line.wants_to_write != link.awaits_write:
            link.awaits_write = link.line.wants_to_write
            self._loop.watch(link.peer, lambda: self._ready(link), write=link.awaits_write)

    def _hear(self, link: NodeLink, line: SecureLine) -> None:
        values = line.get()
        if link.stage != "open":
            self._introduce(link, line, values)
        if link.stage != "open":
            return
        messages = link.channel.take(values)
        if messages:
            link.heard_at = clock()
        for message in messages:
            self._take(link, message)
        if PongMessage() in messages:
            link.channel.confirm()
            if link.gone and not link.answers and link.has_living:
                link.answers = True
                why = f"{link.gone}, and it answers: its jobs can save"
                self.events.append(NodeLeaving(link.node, why, is_ending=False))

    def _introduce(self, link: NodeLink, line: SecureLine, values: list[Any]) -> None:
        """Answer the daemon's hello and read the runner's greeting, which are the first of these values."""
        if link.stage == "hello" and values:
            request = SessionRequest(link.session, link.channel.seen, self._fleet.lease_seconds, link.node)
            channel_module.answer(bytes.fromhex(self._fleet.secret), line, values.pop(0), request)
            link.stage = "answer"
        if link.stage == "answer" and values:
            self._greeted(link, line, from_plain(SessionGreeting, values.pop(0)))

    def _greeted(self, link: NodeLink, line: SecureLine, greeting: SessionGreeting) -> None:
        if link.lost:
            self.false_alarms.append(f"node '{link.node}' answers again after it had been given up")
        if link.attached and not greeting.known and not link.lost:
            # The runner's lease ran out, or it was killed: its replicas have ended with it.
            self._lose(link, f"the replicas on node '{link.node}' were ended there")
            self._leave(link)
            return
        link.stage, link.attached, link.trouble = "open", True, ""
        link.heard_at = clock()
        link.ping_at = link.heard_at
        link.channel.attach(line, greeting.seen)
        if link.lost:
            link.channel.send(EndRunnerRequest())
            self._leave(link)

    def _forget(self, link: NodeLink, process: ReplicaProcess) -> None:
        """Forget a replica that departed and has been swept; end the runner after its last replica."""
        link.places.pop(process.key, None)
        if not link.places and not link.clear:
            link.channel.send(EndRunnerRequest())
            self._leave(link)

    def _take(self, link: NodeLink, message: RunnerMessage) -> None:
        match message:
            case NodeNoticeMessage():
                if link.has_living:
                    why = f"node '{link.node}' is taken back by its engine"
                    self.events.append(NodeLeaving(link.node, why, is_ending=True))
            case ClearMessage(number):
                if number == link.clear:
                    link.clear, link.is_clear = 0, True
                    link.places.clear()
            case ForkedMessage() | OutputMessage() | OverMemoryMessage() | SweptMessage() | ExitMessage():
                place = link.places.get(message.key)
                if place is not None:
                    self._take_of(link, place, message)

    def _take_of(
        self,
        link: NodeLink,
        place: RemoteReplica,
        message: ForkedMessage | OutputMessage | OverMemoryMessage | SweptMessage | ExitMessage,
    ) -> None:
        """Handle a message about one replica."""
        match message:
            case ForkedMessage(_, pid):
                place.process.pid, place.process.up = pid, True
            case OutputMessage(_, data):
                place.sink(data)
            case OverMemoryMessage(key, used_bytes):
                self._over_memory[key] = used_bytes
            case SweptMessage():
                self._forget(link, place.process)
            case ExitMessage(_, code, asked, lacks_memory):
                place.code = code
                self._lacks_memory = self._lacks_memory or lacks_memory
                self.events.append(RemoteExit(place.process, code, asked))
