"""Writes a line for each kind of refused connection, with who connected; strangers cannot make it write many.

Runs wherever a process of ours listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

from pollux.backends.process.socket_owner import owner_of

__all__ = ["RefusalLog", "Refusals"]

_LOG_SECONDS = 10.0


# A shorter line is written whole even if others write meanwhile.
_MAX_LINE_BYTES = 2000


class Refusals:
    """A pipe by which a process hears of refusals, its own and those of processes that it forks.

    `fd` is the end to read. Once it is made, every `RefusalLog` without a writer of its own also writes here.
    """

    _out = -1

    def __init__(self) -> None:
        self.fd, Refusals._out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def read(self) -> list[tuple[int, str]]:
        """What was refused since the last time: how often, and the line about it."""
        with contextlib.suppress(OSError):
            lines = os.read(self.fd, 1 << 16).decode(errors="replace").splitlines()
            return [(int(count), text) for count, _, text in (line.partition(" ") for line in lines) if count.isdigit()]
        return []

    @classmethod
    def tell(cls, count: int, text: str) -> None:
        """Write a line; without a pipe or a reader this does nothing."""
        if cls._out >= 0:
            with contextlib.suppress(OSError):
                os.write(cls._out, f"{count} {text}"[:_MAX_LINE_BYTES].encode() + b"\n")


def _print(text: str, count: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
    Refusals.tell(count, text)


class RefusalLog:
    """Writes at most one line per interval for each kind of refusal, with the number since the last line.

    `what` is what refuses, such as "the job's store"; `write` takes a line and the number of its refusals.
    By default it writes to the error stream and the pipe of `Refusals`.
    """

    def __init__(self, what: str, write: Callable[[str, int], None] = _print) -> None:
        self._what = what
        self._write = write
        self._told: dict[str, tuple[float, int]] = {}

    def refuse(self, peer: socket.socket, where: tuple[str, int], kind: str, why: str) -> None:
        """Report that the connection from `where` was refused, with its user if that is one of this machine."""
        user = None
        if self._is_due(kind):
            with contextlib.suppress(OSError, ValueError):
                user = owner_of(where, peer.getsockname())
        self.tell(f"{where[0]}:{where[1]}" + ("" if user is None else f" (user {user})"), kind, why)

    def tell(self, who: str, kind: str, why: str) -> None:
        """Report a refusal of somebody whose name is known."""
        now = time.monotonic()
        at, more = self._told.get(kind, (float("-inf"), 0))
        if now - at < _LOG_SECONDS:
            self._told[kind] = at, more + 1
            return
        self._told[kind] = now, 0
        self._write(f"{self._what} refused {who}: {why}" + (f"; and {more} more before" if more else ""), more + 1)

    def _is_due(self, kind: str) -> bool:
        return time.monotonic() - self._told.get(kind, (float("-inf"), 0))[0] >= _LOG_SECONDS
