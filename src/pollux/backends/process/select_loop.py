"""What every process of a backend sleeps on: files, signals, wake-ups from other threads, and children that end."""

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
    """A selector that calls a function for each file, and that signals and other threads can wake."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.watch(self._wake_reader, self._drain_wakes)

    def watch(self, file: _Watched, call: Callable[[], object], read: bool = True, write: bool = False) -> None:
        """Call the function whenever the file can be read, or written; a file that was watched is watched anew."""
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        if file in self._selector.get_map():
            self._selector.modify(file, events, call)
        else:
            self._selector.register(file, events, call)

    def unwatch(self, file: _Watched) -> None:
        """Watch the file no more; one that is closed already has left the kernel's list by itself."""
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._selector.unregister(file)

    def ready(self, timeout: float | None) -> list[Callable[[], object]]:
        """What is to be called, once a file is ready, or after the timeout in seconds; None: no timeout."""
        return [key.data for key, _ in self._selector.select(timeout)]

    def turn(self, due: float | None) -> None:
        """Sleep until that monotonic time at most, and call what is to be called."""
        for call in self.ready(None if due is None else max(0.0, due - time.monotonic())):
            call()

    def wake(self) -> None:
        """End the sleep; from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"x")

    def listen_to_signals(self, on_terminate: Callable[[], object] | None) -> None:
        """Have signals end the sleep: SIGTERM calls the function, None ignores it; SIGINT and SIGHUP are ignored."""
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        if on_terminate is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGTERM, lambda number, frame: on_terminate())
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Close what this process has of it; in a forked process the parent's loop goes on. A `wake` does nothing."""
        self._selector.close()
        numbers, self._wake_reader, self._wake_writer = (self._wake_reader, self._wake_writer), -1, -1
        for fd in numbers:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_reader, _READ_BYTES)


def ended_children() -> Iterator[tuple[int, int]]:
    """Number and exit code (minus the signal's number) of each child that has ended since the last time."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)
