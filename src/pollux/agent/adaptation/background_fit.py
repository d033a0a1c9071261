"""The fit of the throughput model off the training thread, with a deadline.

What is fitted comes from `step_profile`, the fit itself from `pollux.goodput`. Nothing here waits in a training step.
"""

from __future__ import annotations

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
"""`fitter(rows, previous) -> result`: what `pollux.goodput.fit` does."""

_VERSION = 1
# Threads that outlive their deadline cannot be ended; with this many no further fit is begun.
_MOST_OVERDUE = 2


def _published(rows: Sequence[Observation], previous: PublishedThroughput | None) -> FitResult[PublishedThroughput]:
    # Imported on the thread, so that the training thread pays for neither the import nor the work.
    from pollux.goodput import fit

    return fit(rows, previous)


class BackgroundFit:
    """Fits `PublishedThroughput` on a daemon thread of its own; requests and reads never wait.

    The newest request wins; one that has not begun when a newer comes is dropped. A fit that raises, does not
    converge or takes longer than `deadline_seconds` leaves the last good result in place and says so in `reason`.
    The thread ends when there is nothing to do, and does not keep the interpreter alive. After a fork the child
    has the results so far, and a thread of its own on its next request.
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
        self._good: FitResult[PublishedThroughput] | None = None
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
        """What went wrong in the newest fit; empty when it was clean or there was none."""
        with self._lock():
            self._check_deadline()
            return self._reason

    @property
    def parameters(self) -> PublishedThroughput | None:
        """The newest good parameters, fitted here or loaded; None before there are any."""
        with self._lock():
            return self._previous

    def request(self, rows: Sequence[Observation]) -> None:
        """Ask for a fit of these rows and return at once; without rows, or after `close`, nothing happens."""
        if not rows:
            return
        with self._lock():
            self._check_deadline()
            if self._closed:
                return
            self._pending = tuple(rows)
            if self._worker is None:
                self._start()

    def result(self) -> FitResult[PublishedThroughput] | None:
        """The newest good result, at once; None before there is one."""
        with self._lock():
            self._check_deadline()
            return self._good

    def wait(self, timeout_seconds: float) -> bool:
        """Wait till nothing is being fitted, for places outside the training loop; whether that came in time."""
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
        """Take no more requests, and drop what has not begun; a fit under way ends by itself. May be called twice."""
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
        """Start the next fit from the parameters of a state."""
        require_version("the throughput model", state, _VERSION)
        from pollux.goodput import PublishedThroughput

        values = state["parameters"]
        with self._lock():
            self._previous = None if values is None else PublishedThroughput(*values)

    def _lock(self) -> threading.Condition:
        """The lock to hold. A forked child has none of its parent's threads, and begins with nothing under way."""
        if self._process != os.getpid():
            self._process = os.getpid()
            # A thread of the parent may have held the old lock at the fork, and no one would ever release it here.
            self._condition = threading.Condition()
            self._pending = self._worker = self._began = None
            self._overdue = []
        return self._condition

    def _start(self) -> None:
        self._overdue = [thread for thread in self._overdue if thread.is_alive()]
        if len(self._overdue) >= _MOST_OVERDUE:
            self._pending = None
            self._reason = f"{len(self._overdue)} fits are past their deadline and still running: no further one begun"
            return
        self._generation += 1
        self._began = None
        self._worker = threading.Thread(target=self._work, args=(self._generation,), name="pollux-fit", daemon=True)
        self._worker.start()

    def _check_deadline(self) -> None:
        """Give up a fit that has run too long: its thread goes on alone, and what it finds is dropped."""
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
                self._reason = reason
                self._began = None
                if result is not None:
                    self._good, self._previous = result, result.parameters

    def _fitted(
        self, rows: Sequence[Observation], previous: PublishedThroughput | None
    ) -> tuple[FitResult[PublishedThroughput] | None, str]:
        """The result where it is good, and what to say about it."""
        try:
            result = self._fitter(rows, previous)
        except Exception as error:  # the edge of the thread's loop: training must not suffer from a fit
            return None, f"the fit failed ({type(error).__name__}: {error}): kept the previous parameters"
        if result.converged and result.parameters is not None:
            return result, result.reason
        return None, result.reason or "the fit did not converge: kept the previous parameters"
