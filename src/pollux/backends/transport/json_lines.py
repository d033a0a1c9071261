"""Reads lines of JSON from a socket, with a limit on their length."""

from __future__ import annotations

import json
from typing import Any, Protocol

__all__ = ["LineReader", "line_of"]

_READ_BYTES = 1 << 18


def line_of(value: Any) -> bytes:
    """A plain value as a line."""
    return json.dumps(value).encode() + b"\n"


class _Receiver(Protocol):
    def recv(self, size: int, /) -> bytes: ...


class LineReader:
    """Splits the bytes of a socket into lines of at most `max_bytes`."""

    def __init__(self, peer: _Receiver, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._peer = peer
        self._rest = b""

    def lines(self) -> list[bytes] | None:
        """The whole lines of one read; None once the other side has closed the socket, or a line is too long."""
        try:
            piece = self._peer.recv(_READ_BYTES)
        except (TimeoutError, BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        is_too_long = any(len(line) > self.max_bytes for line in (*lines, self._rest))
        return None if not piece or is_too_long else lines
