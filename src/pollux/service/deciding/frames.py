"""Messages of any length over a socket between the service and its decision process."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

__all__ = ["Frames"]

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


class Frames:
    """One end of the socket. While it waits, it calls `look` every `seconds`; `look` may raise."""

    def __init__(self, line: socket.socket, look: Callable[[], None] | None = None, seconds: float = 1.0) -> None:
        self._line = line
        self._look = look
        line.settimeout(None if look is None else seconds)

    def send(self, message: bytes) -> None:
        """Send one message; OSError if the other end is gone."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[self._line.send(rest[:_CHUNK]) :]
            except TimeoutError:
                self._waits()

    def receive(self) -> bytes:
        """The next message; EOFError if the other end has closed."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            try:
                piece = self._line.recv(min(length - len(found), _CHUNK))
            except TimeoutError:
                self._waits()
                continue
            if not piece:
                raise EOFError("the other end has closed")
            found += piece
        return bytes(found)

    def _waits(self) -> None:
        if self._look is not None:
            self._look()

    def has_news(self) -> bool:
        """Whether data has come, or the other end has closed; does not wait."""
        before = self._line.gettimeout()
        self._line.settimeout(0.0)
        try:
            self._line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._line.settimeout(before)
        return True

    def close(self) -> None:
        """Close this end."""
        self._line.close()
