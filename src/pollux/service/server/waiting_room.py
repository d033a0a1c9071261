"""Connections whose first headers are incomplete: a socket and some bytes each, so that thousands cost little.

`connections` handles what follows complete headers. Over TLS a handshake comes first, which the event loop does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass

from pollux.service.server.peers import Peer, Peers

__all__ = ["TOO_SLOW", "WaitingRoom"]

TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain\r\ncontent-length: 16\r\nconnection: close\r\n\r\n"
    b"Request Timeout\n"
)
"""The answer to a request that does not come in time."""

_END = re.compile(rb"\n\r?\n")
# The protocol takes this many bytes of incomplete headers, and refuses more.
_MOST_BYTES = 16 * 1024
_SWEEPS = 4
_log = logging.getLogger("pollux.service")


@dataclass(slots=True)
class _Waiting:
    connection: socket.socket
    since: float
    said: bytes = b""


class WaitingRoom:
    """Reads from each connection until its headers are complete, then passes it to `serve`.

    Closes a connection that is too slow.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        peers: Peers,
        seconds: float,
        serve: Callable[[socket.socket, Peer, bytes], None],
    ) -> None:
        self._loop, self._peers, self._seconds, self._serve = loop, peers, seconds, serve
        # In order of arrival, so that those that have waited too long are the first.
        self._waiting: dict[Peer, _Waiting] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def enter(self, connection: socket.socket, peer: Peer) -> None:
        """Add a connection; it does not wait if its headers are complete."""
        self._waiting[peer] = _Waiting(connection, self._loop.time())
        peer.drop = lambda: self._dismiss(peer)
        if self._hear(peer):
            self._loop.add_reader(connection.fileno(), self._hear, peer)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._seconds / _SWEEPS, self._end_the_slow)

    def close(self) -> None:
        """End all connections."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for peer in list(self._waiting):
            self._dismiss(peer)

    def _hear(self, peer: Peer) -> bool:
        """Read what is there; returns whether it waits on."""
        waiting = self._waiting[peer]
        try:
            piece = waiting.connection.recv(65536)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            piece = b""
        if not piece:
            self._dismiss(peer)
            return False
        # The end of headers may lie across two pieces.
        seen = max(len(waiting.said) - 3, 0)
        waiting.said += piece
        if _END.search(waiting.said, seen) is None and len(waiting.said) <= _MOST_BYTES:
            return True
        self._leave(peer)
        self._serve(waiting.connection, peer, waiting.said)
        return False

    def _leave(self, peer: Peer) -> _Waiting | None:
        waiting = self._waiting.pop(peer, None)
        if waiting is not None:
            self._loop.remove_reader(waiting.connection.fileno())
        return waiting

    def _dismiss(self, peer: Peer, answer: bytes = b"") -> None:
        waiting = self._leave(peer)
        self._peers.leave(peer)
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.connection.send(answer)
            waiting.connection.close()

    def _end_the_slow(self) -> None:
        since = self._loop.time() - self._seconds
        late = []
        for peer, waiting in self._waiting.items():
            if waiting.since > since:
                break
            late.append(peer)
        for peer in late:
            _log.warning("a peer sends its headers too slowly: its connection was ended")
            self._dismiss(peer, TOO_SLOW)
        again = self._waiting
        self._sweep = self._loop.call_later(self._seconds / _SWEEPS, self._end_the_slow) if again else None
