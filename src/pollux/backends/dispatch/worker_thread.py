"""The one thread of a backend: it sleeps until something comes, does its work, and tells the listener of events."""

from __future__ import annotations

import collections
import socket
import threading
import time
from collections.abc import Callable

from pollux.backends.dispatch.failure_backoff import FailureBackoff
from pollux.backends.process.select_loop import SelectLoop
from pollux.backends.protocol import BackendEvent, Listener

__all__ = ["WorkerThread"]


class WorkerThread:
    """Calls `work` under `lock` whenever something came; what goes wrong is tried again, later and later.

    `work` does whatever can be done now, and is cheap where nothing changed. Events are told without the lock.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.listener: Listener | None = None
        self.stopping = threading.Event()
        self._do_work = work
        self._events: collections.deque[BackendEvent] = collections.deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._loop = SelectLoop()
        self._thread: threading.Thread | None = None
        self._failures = FailureBackoff()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and gets its work done, not counting a mistake now and then."""
        return self._thread is not None and self._thread.is_alive() and self._failures.are_few

    @property
    def was_started(self) -> bool:
        """Whether it ran, or was ended before it could."""
        return self._thread is not None or self.stopping.is_set()

    def start(self, name: str) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return once the thread has ended."""
        self.stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close what it sleeps on; after `stop`."""
        self._loop.close()

    def wake(self) -> None:
        """Have it work now."""
        self._loop.wake()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do that, and then the work, after so long."""
        self._timers.append((time.monotonic() + seconds, what))

    def wake_after(self, seconds: float) -> None:
        """Work again after so long."""
        self.after(seconds, lambda: None)

    def tell(self, event: BackendEvent) -> None:
        """Have the listener hear of this, after what was told before."""
        self._events.append(event)

    def step(self, what: Callable[[], object]) -> None:
        """One step of the work: a mistake in it holds up neither the other steps nor the other jobs."""
        self._failures.step(what)

    def watch(self, file: socket.socket, heard: Callable[[], None]) -> None:
        """Call `heard` whenever there is something to read."""
        self._loop.watch(file, heard)

    def unwatch(self, file: socket.socket) -> None:
        """Read there no more."""
        self._loop.unwatch(file)

    def _run(self) -> None:
        while not self.stopping.is_set():
            pause = self._failures.turn(self._turn)
            if pause > 0.0 and not self.stopping.wait(pause):
                # What went wrong is tried again, also where nothing else happens.
                self.wake()

    def _turn(self) -> None:
        with self.lock:
            now = time.monotonic()
            due = [what for at, what in self._timers if at <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for what in due:
                self.step(what)
            self._do_work()
            timeout = self._timeout()
        told = bool(self._events)
        while self._events and self.listener is not None:
            # Only what was heard is taken off: the end of a job must not get lost.
            self.listener(self._events[0])
            self._events.popleft()
        for call in self._loop.ready(0.0 if told else timeout):
            with self.lock:
                self.step(call)

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(at for at, _ in self._timers) - time.monotonic())
