"""The thread in which the policy runs: decisions go before plans, and one answer serves all plans that it covers.

`pipeline` applies decisions, `forecast` makes plans.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pollux.controller import JobRecord
from pollux.core import Decision, Snapshot
from pollux.core.errors import PolluxError, Unreachable
from pollux.service.deciding.process_policy import ProcessPolicy
from pollux.service.engine.forecast import Forecast, plan_of
from pollux.service.engine.requests import our_fault
from pollux.wire.status import Plan

__all__ = ["STOPPING", "DecisionResult", "DecisionThread", "pass_on"]

_log = logging.getLogger("pollux.service")

STOPPING = "the service is stopping; try again when it is back ('pollux up')"
"""The error for requests to an engine that is stopping."""

# While the policy runs, request threads get the interpreter after this time (Python's default is 5 ms).
_SWITCH_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """A decision of the policy; None if it failed."""

    snapshot: Snapshot
    decision: Decision | None
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _PlanRequest:
    """A caller that waits for a plan."""

    forecast: Forecast
    answer: Future[Plan] = field(default_factory=Future)


class DecisionThread:
    """One policy in one thread, or in a process whose answers the thread waits for.

    `jobs` are all records, for estimates; they may be read from any thread.
    """

    def __init__(self, policy: ProcessPolicy, jobs: Mapping[str, JobRecord]) -> None:
        self._policy = policy
        self._jobs = jobs
        self._changed = threading.Condition()
        self._decisions: list[Callable[[], tuple[Snapshot, Decision | None]]] = []
        self._plans: list[_PlanRequest] = []
        self._stopped = False
        self._thread: threading.Thread | None = None

    def decide(self, snapshot: Snapshot, begins: Callable[[], None], done: Callable[[DecisionResult], None]) -> None:
        """Decide on a snapshot, before any plan that waits; `begins` and `done` are called in the thread."""

        def work() -> tuple[Snapshot, Decision | None]:
            begins()
            began = time.perf_counter()
            decision = self._allocate(snapshot)
            done(DecisionResult(snapshot, decision, time.perf_counter() - began))
            return snapshot, decision

        with self._changed:
            self._decisions.append(work)
            self._wake()

    def plan(self, forecast: Forecast) -> Future[Plan]:
        """The plan of a job, made when no decision is due."""
        waiting = _PlanRequest(forecast)
        with self._changed:
            if self._stopped:
                waiting.answer.set_exception(Unreachable(STOPPING))
            else:
                self._plans.append(waiting)
                self._wake()
        return waiting.answer

    def stop(self) -> None:
        """End when the policy has answered, or at once if it has a process; waiting plans are refused."""
        with self._changed:
            self._stopped = True
            self._decisions.clear()
            refused, self._plans = self._plans, []
            self._changed.notify_all()
        for waiting in refused:
            waiting.answer.set_exception(Unreachable(STOPPING))
        self._policy.close()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="pollux-policy", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._work_until_stopped()
        finally:
            self._policy.end()

    def _work_until_stopped(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._decisions or self._plans)
                if self._stopped:
                    return
                work = self._decisions.pop(0) if self._decisions else None
            try:
                self._decide_next(work) if work is not None else self._next_plans()
            except Exception:
                _log.exception("the policy's thread failed; it goes on with what is next")

    def _allocate(self, snapshot: Snapshot) -> Decision | None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_SECONDS, interval))
        try:
            return self._policy.allocate(snapshot)
        except Exception:
            if self._stopped:
                return None
            _log.exception("policy '%s' failed; all placements stay until the next decision", self._policy.name)
            return None
        finally:
            sys.setswitchinterval(interval)

    def _decide_next(self, work: Callable[[], tuple[Snapshot, Decision | None]]) -> None:
        snapshot, decision = work()
        if decision is not None:
            self._answer(self._covered(snapshot), snapshot, decision)

    def _covered(self, snapshot: Snapshot) -> list[_PlanRequest]:
        """Remove and return the plans that a decision on this snapshot covers: those of jobs in the snapshot."""
        shown = {job.id for job in snapshot.jobs}
        covered: list[_PlanRequest] = []
        with self._changed:
            waiting, self._plans = self._plans, []
            for one in waiting:
                covers = not one.forecast.is_draft and one.forecast.job_id in shown
                (covered if covers else self._plans).append(one)
        return covered

    def _next_plans(self) -> None:
        """Answer the oldest plan, and all others that its snapshot covers."""
        with self._changed:
            if not self._plans:
                return
            first = self._plans.pop(0)
            shared = [first, *(one for one in self._plans if not one.forecast.is_draft)]
        newest = first.forecast
        if not newest.is_draft:
            newest = max((one.forecast for one in shared), key=lambda one: one.snapshot.revision)
            if not newest.shows(first.forecast.job_id):
                newest = first.forecast
        snapshot = newest.snapshot
        decision = self._allocate(snapshot) if newest.shows(first.forecast.job_id) else Decision({})
        covered = [] if newest.is_draft else self._covered(snapshot)
        self._answer([first, *covered], snapshot, Decision({}) if decision is None else decision)

    def _answer(self, plans: list[_PlanRequest], snapshot: Snapshot, decision: Decision) -> None:
        for waiting in plans:
            if not waiting.answer.set_running_or_notify_cancel():
                continue
            try:
                waiting.answer.set_result(plan_of(waiting.forecast, snapshot, decision, self._jobs))
            except PolluxError as error:
                waiting.answer.set_exception(error)
            except Exception as error:
                _log.exception("a plan failed")
                waiting.answer.set_exception(our_fault(error))


def pass_on(done: Future[Any], onward: Future[Any], what: Callable[[Any], Any]) -> None:
    """Pass the result of one future, or its error, on to another that was not cancelled."""
    with suppress(InvalidStateError):
        if (error := done.exception()) is not None:
            onward.set_exception(error)
        else:
            onward.set_result(what(done.result()))
