"""Lines about connections that were refused: few, whatever strangers do, each with who it was.

Runs wherever a process of ours listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from pollux.backends.process.socket_owner import owner_of

__all__ = ["RefusalLog"]

_LOG_SECONDS = 10.0


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class RefusalLog:
    """One line for each kind of refusal in so many seconds, with how many there were since the last one.

    `what` is what refuses, as in "the job's store"; `write` takes a line, the error stream where none is given.
    """

    def __init__(self, what: str, write: Callable[[str], None] = _print) -> None:
        self._what = what
        self._write = write
        self._told: dict[str, tuple[float, int]] = {}

    def refuse(self, peer: socket.socket, where: tuple[str, int], kind: str, why: str) -> None:
        """Tell that the connection from `where` was refused; its user too, where that is one of this machine."""
        user = None
        if self._is_due(kind):
            with contextlib.suppress(OSError, ValueError):
                user = owner_of(where, peer.getsockname())
        self.tell(f"{where[0]}:{where[1]}" + ("" if user is None else f" (user {user})"), kind, why)

    def tell(self, who: str, kind: str, why: str) -> None:
        """The same of somebody whose name is known."""
        now = time.monotonic()
        at, more = self._told.get(kind, (float("-inf"), 0))
        if now - at < _LOG_SECONDS:
            self._told[kind] = at, more + 1
            return
        self._told[kind] = now, 0
        self._write(f"{self._what} refused {who}: {why}" + (f"; and {more} more before" if more else ""))

    def _is_due(self, kind: str) -> bool:
        return time.monotonic() - self._told.get(kind, (float("-inf"), 0))[0] >= _LOG_SECONDS
