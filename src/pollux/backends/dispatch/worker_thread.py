"""The one thread of a backend: it sleeps until something comes, does its work, and tells the listener of events.

What its work is, is said by whoever inherits it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from pollux.backends.dispatch.failure_backoff import FailureBackoff
from pollux.backends.protocol import BackendEvent, Listener

__all__ = ["WorkerThread"]


class WorkerThread(ABC):
    """Everything happens under `_lock`, but telling; what goes wrong is tried again, later and later."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._events: collections.deque[BackendEvent] = collections.deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._selector = selectors.DefaultSelector()
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake[0], selectors.EVENT_READ, self._woken)
        self._listener: Listener | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._halt = threading.Event()
        self._stumbles = FailureBackoff()

    @abstractmethod
    def _work(self) -> None:
        """Do whatever can be done now; cheap where nothing changed."""

    @property
    def healthy(self) -> bool:
        """Whether its thread runs and gets its work done, not counting a mistake now and then."""
        return self._thread is not None and self._thread.is_alive() and self._stumbles.are_few

    def _begin(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _end(self) -> None:
        """Return once the thread has ended."""
        self._closing = True
        self._halt.set()
        self._rouse()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            pause = self._stumbles.turn(self._turn)
            if pause > 0.0 and not self._halt.wait(pause):
                # What went wrong is tried again, also where nothing else happens.
                self._rouse()

    def _turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            due = [what for at, what in self._timers if at <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for what in due:
                self._stumbles.step(what)
            self._work()
            timeout = self._timeout()
        told = bool(self._events)
        while self._events and self._listener is not None:
            # Only what was heard is taken off: the end of a job must not get lost.
            self._listener(self._events[0])
            self._events.popleft()
        for key, _ in self._selector.select(0.0 if told else timeout):
            with self._lock:
                self._stumbles.step(key.data)

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(at for at, _ in self._timers) - time.monotonic())

    def _rouse(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake[1], b"x")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake[0], 4096)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, what))
