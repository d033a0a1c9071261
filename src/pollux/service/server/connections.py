"""Connections with deadlines: an acceptor with a limit of their number, and uvicorn's protocol with time limits.

Uvicorn waits for headers and bodies as long as a peer likes, and accepts as many peers as it may open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Literal

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pollux.service.http.middleware import PEER_KEY
from pollux.service.server.peers import ConnectionLimits, Peer, Peers
from pollux.service.server.waiting_room import TOO_SLOW, WaitingRoom

__all__ = ["ConnectionAcceptor", "GuardedConnection"]

_AT_ONCE = 32
_BACKLOG = 4096
_PAUSE_SECONDS = 0.1
_TLS_SECONDS = 10.0
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("pollux.service")


class GuardedConnection(H11Protocol):
    """One connection. Headers, bodies and answers that take too long end it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        peer: Peer,
        peers: Peers,
        limits: ConnectionLimits,
        said: bytes = b"",
    ) -> None:
        super().__init__(config, server_state, {PEER_KEY: peer}, asyncio.get_running_loop())
        self._peer, self._peers, self._limits = peer, peers, limits
        self._said = said
        self._awaited: Literal["headers", "body"] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take what has come of the first request, and wait for the rest."""
        super().connection_made(transport)
        self._peer.drop = transport.abort
        self._expect("headers")
        if self._said:
            said, self._said = self._said, b""
            self.data_received(said)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._expect(None)
        self._unset_stuck()
        self._unset_keepalive_if_required()
        self._peers.leave(self._peer)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and see what is still to come."""
        super().data_received(data)
        self._peer.is_idle = self._is_to_come("IDLE")
        self._expect("headers" if self._peer.is_idle else "body" if self._is_to_come("SEND_BODY") else None)

    def on_response_complete(self) -> None:
        """Keep the connection for a while; a stranger's for a moment."""
        limits = self._limits
        known = self._peer.is_known
        self.timeout_keep_alive = limits.keep_alive_seconds if known else limits.stranger_keep_alive_seconds  # type: ignore[assignment]
        self._peer.is_idle = True
        super().on_response_complete()
        # Its next request may have come with the last one, without its body.
        self._expect("body" if self._is_to_come("SEND_BODY") else None)

    def _is_to_come(self, state: str) -> bool:
        """Whether the peer is in a state of h11's: no request has begun (IDLE), or its body is incomplete."""
        return str(self.conn.their_state) == state

    def pause_writing(self) -> None:
        """The peer does not take its answer."""
        super().pause_writing()
        self._unset_stuck()
        self._stuck = self.loop.call_later(self._limits.stuck_seconds, self._give_up, "takes no answer")

    def resume_writing(self) -> None:
        """The peer accepts data again."""
        self._unset_stuck()
        super().resume_writing()

    def _expect(self, what: Literal["headers", "body"] | None) -> None:
        """Begin to wait for a part of a request; a part that has begun to come keeps its deadline."""
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited, self._deadline = what, None
        if what is not None:
            seconds = self._limits.header_seconds if what == "headers" else self._limits.body_seconds
            self._deadline = self.loop.call_later(seconds, self._give_up, f"sends its {what} too slowly")

    def _unset_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _give_up(self, why: str) -> None:
        if self.transport.is_closing():
            return
        _log.warning("a peer %s: its connection was ended", why)
        if self._awaited is not None and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(TOO_SLOW)
            self.transport.close()
        # Do not wait until the peer takes the rest.
        self.loop.call_soon(self.transport.abort)


class ConnectionAcceptor:
    """Accepts connections, a few at a time, so that other work gets its turn, and never beyond the limits.

    It has the methods of `asyncio.Server` that uvicorn calls.
    """

    def __init__(
        self, listening: socket.socket, config: Config, state: ServerState, limits: ConnectionLimits, peers: Peers
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._ssl: ssl.SSLContext | None = config.ssl
        self._make: Callable[[Peer, bytes], GuardedConnection] = lambda peer, said: GuardedConnection(
            config, state, peer, peers, limits, said
        )
        self._room = WaitingRoom(self._loop, peers, limits.header_seconds, self._begin)
        self._peers = peers
        self._tasks: set[asyncio.Task[Any]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._closed = False
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        self._loop.add_reader(listening.fileno(), self._take_some)

    def close(self) -> None:
        """Accept no more."""
        if self._closed:
            return
        self._closed = True
        if self._paused is None:
            self._loop.remove_reader(self._socket.fileno())
        else:
            self._paused.cancel()
        self._room.close()

    async def wait_closed(self) -> None:
        """Wait for connections that are being made."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take_some(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._no_room(error)
                return
            peer = self._peers.come(str(address[0]))
            connection.setblocking(False)
            if self._ssl is None:
                self._room.enter(connection, peer)
            else:
                self._begin(connection, peer)

    def _no_room(self, error: OSError) -> None:
        if error.errno not in _NO_FILES:
            raise error
        _log.warning("no connection can be accepted: %s; one without a token is ended for it", error.strerror)
        self._peers.drop_a_stranger()
        self._loop.remove_reader(self._socket.fileno())
        self._paused = self._loop.call_later(_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self._paused = None
        self._loop.add_reader(self._socket.fileno(), self._take_some)

    def _begin(self, connection: socket.socket, peer: Peer, said: bytes = b"") -> None:
        peer.drop = lambda: _shut(connection)
        task = self._loop.create_task(self._connect(connection, peer, said))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket, peer: Peer, said: bytes) -> None:
        seconds = None if self._ssl is None else _TLS_SECONDS
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(peer, said),
                connection,
                ssl=self._ssl,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError:
            # No TLS, or not in time; the connection is closed already.
            self._peers.leave(peer)


def _shut(connection: socket.socket) -> None:
    """End a connection that is about to be handed to the event loop, which closes it when it sees its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
