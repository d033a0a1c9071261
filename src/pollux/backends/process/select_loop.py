"""The select loop of every process of a backend: waits for files, signals, other threads and children that end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator

__all__ = ["SelectLoop", "ended_children"]

_Watched = int | socket.socket
_READ_BYTES = 4096


class SelectLoop:
    """Calls a function for each file that is ready; signals and other threads can wake it."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_reader, self._drain_wakes)

    def watch(self, file: _Watched, call: Callable[[], object], read: bool = True, write: bool = False) -> None:
        """Call the function whenever the file can be read, or written; replaces what was watched on this file."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        if file in self._selector.get_map():
            self._selector.modify(file, events, call)
        else:
            self._selector.register(file, events, call)

    def unwatch(self, file: _Watched) -> None:
        """Stop watching a file; nothing to do for one that is closed already."""
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._selector.unregister(file)

    def ready(self, timeout: float | None) -> list[Callable[[], object]]:
        """Wait until a file is ready or the timeout in seconds is over (None: no timeout); the functions to call."""
        return [key.data for key, _ in self._selector.select(timeout)]

    def turn(self, due: float | None) -> None:
        """Wait until that monotonic time at most, and call the functions of the files that are ready."""
        for call in self.ready(None if due is None else max(0.0, due - time.monotonic())):
            call()

    def wake(self) -> None:
        """End the wait; may be called from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"x")

    def listen_to_signals(self, on_terminate: Callable[[], object] | None) -> None:
        """Let signals end the wait. SIGTERM calls the function, None ignores it; SIGINT and SIGHUP are ignored."""
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        if on_terminate is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: on_terminate())
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Close the files of this loop; `wake` then does nothing. After a fork the parent's loop goes on."""
        self._selector.close()
        numbers, self._wake_reader, self._wake_writer = (self._wake_reader, self._wake_writer), -1, -1
        for fd in numbers:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, _READ_BYTES)


def ended_children() -> Iterator[tuple[int, int]]:
    """Pid and exit code (or minus the signal's number) of each child that has ended since the last call."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
