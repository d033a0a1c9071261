"""The one thread of a backend: it waits for messages, timers and orders, does its work, and reports events."""

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

# A message to a shim that does not read it takes ten seconds to give up.
_HANG_SECONDS = 30.0


class WorkerThread:
    """Calls `work` under `lock` whenever it is woken; work that fails is tried again after longer and longer pauses.

    `work` does whatever can be done now, and is cheap where nothing has changed. Events are reported without the lock.
    """

    def __init__(self, work: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.listener: Listener | None = None
        self.stopping = threading.Event()
        self._do_work = work
        self._events: collections.deque[BackendEvent] = collections.deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._loop = SelectLoop()
        self._thread: threading.Thread | None = None
        self._failures = FailureBackoff()
        self._clock = clock
        self._busy_since: float | None = None

    @property
    def healthy(self) -> bool:
        """Whether the thread runs, does not hang in a turn, and has not failed several turns in a row."""
        since = self._busy_since
        hangs = since is not None and self._clock() - since > _HANG_SECONDS
        return self._thread is not None and self._thread.is_alive() and not hangs and self._failures.is_healthy

    @property
    def was_started(self) -> bool:
        """Whether the thread was started, or stopped before it was started."""
        return self._thread is not None or self.stopping.is_set()

    def start(self, name: str) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self.stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Close the files of its loop; after `stop`."""
        self._loop.close()

    def wake(self) -> None:
        """Have the thread do its work now."""
        self._loop.wake()

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call the function, and then do the work, after this time."""
        self._timers.append((time.monotonic() + seconds, what))

    def wake_after(self, seconds: float) -> None:
        """Do the work again after this time."""
        self.after(seconds, lambda: None)

    def report(self, event: BackendEvent) -> None:
        """Report an event to the listener, after all earlier ones."""
        self._events.append(event)

    def step(self, what: Callable[[], object]) -> None:
        """Do one step of the work; if it fails, the other steps still run."""
        self._failures.step(what)

    def watch(self, file: socket.socket, heard: Callable[[], None]) -> None:
        """Call `heard` whenever the socket can be read."""
        self._loop.watch(file, heard)

    def unwatch(self, file: socket.socket) -> None:
        """Stop watching the socket."""
        self._loop.unwatch(file)

    def _run(self) -> None:
        while not self.stopping.is_set():
            pause = self._failures.turn(self._turn)
            if pause > 0.0 and not self.stopping.wait(pause):
                # Try failed work again even if nothing else wakes the thread.
                self.wake()

    def _turn(self) -> None:
        self._busy_since = self._clock()
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
            # Remove an event only after the listener has taken it: the end of a job must not get lost.
            self.listener(self._events[0])
            self._events.popleft()
        self._busy_since = None
        for call in self._loop.ready(0.0 if told else timeout):
            self._busy_since = self._clock()
            with self.lock:
                self.step(call)

    def _timeout(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, min(at for at, _ in self._timers) - time.monotonic())
