"""Fits the throughput model on a thread of its own, with a deadline; training never waits for it.

`step_profile` has the rows, `pollux.goodput` the fit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pollux.agent.adaptation.state_version import require_version
from pollux.core.errors import InvalidInput

if TYPE_CHECKING:
    from pollux.goodput import FitResult, Observation, PublishedThroughput

__all__ = ["BackgroundFit", "Fitter"]

Fitter: TypeAlias = "Callable[[Sequence[Observation], PublishedThroughput | None], FitResult[PublishedThroughput]]"
"""`fitter(rows, previous) -> result`, such as `pollux.goodput.fit`."""

_VERSION = 1
_log = logging.getLogger("pollux")
# A thread that misses its deadline cannot be ended. While this many of them run, no fit starts.
_MOST_OVERDUE = 2


def _published(rows: Sequence[Observation], previous: PublishedThroughput | None) -> FitResult[PublishedThroughput]:
    # Imported here, so that the training thread does not spend time on the import either.
    from pollux.goodput import fit

    return fit(rows, previous)


class BackgroundFit:
    """Fits `PublishedThroughput` on a daemon thread; requests and reads never wait.

    A newer request replaces one that has not started. A fit that raises, does not converge or takes longer than
    `deadline_seconds` leaves the last good parameters, and `reason` says why. The thread ends when there is nothing to
    do. After a fork the child has the parameters, and starts a thread of its own with its next request.
    """

    def __init__(
        self,
        deadline_seconds: float = 10.0,
        *,
        fitter: Fitter = _published,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not deadline_seconds > 0.0:
            raise InvalidInput(f"deadline_seconds is {deadline_seconds}: give a number of seconds above 0")
        self._deadline_seconds = deadline_seconds
        self._fitter = fitter
        self._clock = clock
        self._previous: PublishedThroughput | None = None
        self._reason = ""
        self._closed = False
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._pending: tuple[Observation, ...] | None = None
        self._worker: threading.Thread | None = None
        self._began: float | None = None
        self._generation = 0
        self._overdue: list[threading.Thread] = []

    @property
    def reason(self) -> str:
        """What went wrong in the newest fit; empty where nothing did."""
        with self._lock():
            self._check_deadline()
            return self._reason

    @property
    def parameters(self) -> PublishedThroughput | None:
        """The newest good parameters, fitted or loaded; None before there are any."""
        with self._lock():
            return self._previous

    def request(self, rows: Sequence[Observation]) -> None:
        """Request a fit of these rows; ignored without rows and after `close`."""
        if not rows:
            return
        with self._lock():
            self._check_deadline()
            if self._closed:
                return
            self._pending = tuple(rows)
            if self._worker is None:
                self._start()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until no fit runs; returns whether that was in time. Not for the training loop."""
        end = self._clock() + timeout_seconds
        with self._lock():
            while self._worker is not None:
                self._check_deadline()
                left = end - self._clock()
                if left <= 0.0 or self._worker is None:
                    break
                self._condition.wait(min(left, 0.05))
            return self._worker is None

    def close(self) -> None:
        """Drop a request that has not started, and ignore later ones; a fit that runs ends by itself."""
        with self._lock():
            self._closed = True
            self._pending = None
            self._generation += 1
            self._worker = None
            self._condition.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """The newest good parameters, in the order of `PublishedThroughput.parameters`, or None: plain JSON."""
        parameters = self.parameters
        return {"version": _VERSION, "parameters": None if parameters is None else list(parameters.parameters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the parameters of a state; the next fit starts from them."""
        require_version("the throughput model", state, _VERSION)
        from pollux.goodput import PublishedThroughput

        values = state["parameters"]
        with self._lock():
            self._previous = None if values is None else PublishedThroughput(*values)

    def _lock(self) -> threading.Condition:
        """The lock to hold. A forked child has none of its parent's threads, so no fit runs there."""
        if self._process != os.getpid():
            self._process = os.getpid()
            # At the fork a thread of the parent may have held the old lock, which nobody would release in the child.
            self._condition = threading.Condition()
            self._pending = self._worker = self._began = None
            self._overdue = []
        return self._condition

    def _start(self) -> None:
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= _MOST_OVERDUE:
            self._pending = None
            self._reason = f"{len(self._overdue)} fits are past their deadline and still running: no fit started"
            return
        self._generation += 1
        self._began = None
        self._worker = threading.Thread(target=self._work, args=(self._generation,), name="pollux-fit", daemon=True)
        self._worker.start()

    def _check_deadline(self) -> None:
        """Abandon a fit that has run too long: its thread cannot be ended, but its result is dropped."""
        if self._worker is None or self._began is None:
            return
        if self._clock() - self._began <= self._deadline_seconds:
            return
        self._reason = f"the fit took longer than {self._deadline_seconds:g} s: kept the previous parameters"
        self._overdue.append(self._worker)
        self._generation += 1
        self._worker = None
        self._began = None
        if self._pending is not None and not self._closed:
            self._start()

    def _work(self, generation: int) -> None:
        while True:
            with self._condition:
                if generation != self._generation:
                    return
                rows, self._pending = self._pending, None
                if rows is None:
                    self._worker = self._began = None
                    self._condition.notify_all()
                    return
                self._began = self._clock()
                previous = self._previous
            result, reason = self._fitted(rows, previous)
            with self._condition:
                if generation != self._generation:
                    return
                self._check_deadline()
                if generation != self._generation:
                    return
                if reason:
                    _log.debug("throughput model: %s", reason)
                self._reason = reason
                self._began = None
                if result is not None:
                    self._previous = result.parameters

    def _fitted(
        self, rows: Sequence[Observation], previous: PublishedThroughput | None
    ) -> tuple[FitResult[PublishedThroughput] | None, str]:
        """The result where it is good, and the reason where it is not."""
        try:
            result = self._fitter(rows, previous)
        except Exception as error:  # the edge of the thread's loop: a failed fit must not end training
            return None, f"the fit failed ({type(error).__name__}: {error}): kept the previous parameters"
        if result.converged and result.parameters is not None:
            return result, result.reason
        return None, result.reason or "the fit did not converge: kept the previous parameters"
