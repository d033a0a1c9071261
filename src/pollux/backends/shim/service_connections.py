"""The connections of services to a shim: requests come in, and every message goes to all of them."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from pollux.backends.process.refusals import RefusalLog
from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.transport.error_stream import say
from pollux.backends.transport.json_lines import LineReader
from pollux.wire.live.messages import MAX_MESSAGE_BYTES, ShimMessage, decode_message, encode_message
from pollux.wire.socket_owners import user_of

__all__ = ["ServiceConnection", "ServiceConnections"]

_SEND_SECONDS = 5.0
_FULL_SECONDS = 0.05


class ServiceConnection:
    """The connection of one service."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setblocking(True)
        peer.settimeout(_SEND_SECONDS)
        self.peer = peer
        self.reader = LineReader(peer, MAX_MESSAGE_BYTES)

    def send(self, message: ShimMessage) -> bool:
        """Send a message; whether the service took it."""
        try:
            self.peer.sendall(encode_message(message))
        except OSError:
            return False
        return True


class ServiceConnections:
    """All services that are connected; `idle_since` is when the last one disconnected.

    `obey` carries out a request and returns the answer. `on_unknown` is called for a line that this version cannot
    read.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: SelectLoop,
        obey: Callable[[Any], ShimMessage],
        on_unknown: Callable[[], None],
    ) -> None:
        self.idle_since = time.monotonic()
        self._listener = listener
        self._loop = loop
        self._obey = obey
        self._on_unknown = on_unknown
        self._open: list[ServiceConnection] = []
        self._refusals = RefusalLog("the job's shim")

    def __bool__(self) -> bool:
        return bool(self._open)

    def listen(self) -> None:
        """Accept connections from now on."""
        self._listener.setblocking(False)
        self._loop.watch(self._listener, self._accept)

    def tell(self, message: ShimMessage) -> None:
        """Send a message to all services."""
        for connection in [*self._open]:
            if not connection.send(message):
                self._drop(connection)

    def close(self) -> None:
        """Close the copies of the sockets in a forked process."""
        self._listener.close()
        for connection in self._open:
            connection.peer.close()

    def add(self, peer: socket.socket) -> None:
        """Serve a new connection."""
        connection = ServiceConnection(peer)
        self._open.append(connection)
        self._loop.watch(peer, lambda: self._hear(connection))

    def _accept(self) -> None:
        """Only this user and root may give orders: the socket's folder and this check keep others out."""
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                # The caller stays in the queue, and this loop must not turn without a pause.
                time.sleep(_FULL_SECONDS)
            return
        user = user_of(peer)
        if user in (0, os.geteuid()):
            self.add(peer)
            return
        self._refusals.tell(f"user {user}", "user", "only the user whose job this is may order")
        peer.close()

    def _hear(self, connection: ServiceConnection) -> None:
        lines = connection.reader.lines()
        if lines is None:
            self._drop(connection)
            return
        for line in lines:
            try:
                if not connection.send(self._obey(decode_message(line))):
                    self._drop(connection)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                # A service of another version: a shim of its own version will understand it.
                say(f"not understood: {error!r}")
                self._on_unknown()
            except OSError as error:
                # An error of one request must not end the replicas.
                say(f"could not be done: {error}")

    def _drop(self, connection: ServiceConnection) -> None:
        if connection in self._open:
            self._loop.unwatch(connection.peer)
            connection.peer.close()
            self._open.remove(connection)
            self.idle_since = time.monotonic()
