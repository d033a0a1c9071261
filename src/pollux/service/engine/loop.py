"""The engine's thread and its queue: waits for requests, has them processed in batches, and stops at the end.

The policy runs in a second thread. `pipeline` processes events; `engine` has the operations.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pollux.backends.protocol import Backend, BackendEvent, ReplicasEnded
from pollux.controller import HOLDING, GenerationEnded, require
from pollux.controller.machine.settings import SERVICE_FIELDS
from pollux.core import Policy, Snapshot
from pollux.core.errors import StoreFailed, Unreachable
from pollux.service.auth.tokens import Tokens
from pollux.service.clocks.clock_watch import ClockWatch
from pollux.service.deciding.process_policy import ProcessPolicy
from pollux.service.engine.decision_thread import STOPPING, DecisionResult, DecisionThread
from pollux.service.engine.forecast import Forecast
from pollux.service.engine.pipeline import EventPipeline
from pollux.service.engine.requests import Effects, EngineRequest, our_fault
from pollux.service.settings import AtStop, ServiceSettings
from pollux.service.settings.clock import Clock, SystemClock
from pollux.store.protocol import Store, Telemetry
from pollux.wire.status import Plan

__all__ = ["EngineLoop"]

_log = logging.getLogger("pollux.service")

_BATCH = 512
_ANSWER_SECONDS = 120.0
# The time that running jobs may take to end after their grace.
_BEYOND_GRACE_SECONDS = 15.0
# The longest pause after repeated failures of the loop, and before a failed backend is asked again.
_LONGEST_PAUSE_SECONDS = 5.0
_WORTH_SAYING_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Action:
    """An action between two requests. Its future is answered later, or refused at the end."""

    run: Callable[[], None]
    future: Future[None] = field(default_factory=Future)


class EngineLoop:
    """Owns the pipeline, its thread and the policy's thread; may be called from any thread."""

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        store: Store,
        telemetry: Telemetry,
        settings: ServiceSettings,
        clock: Clock,
        tokens: Tokens,
    ) -> None:
        require(policy, SERVICE_FIELDS)
        self._settings = settings
        self._store = store
        self._telemetry = telemetry
        self._backend = backend
        self._clock = clock
        self._queue: queue.SimpleQueue[EngineRequest | _Action] = queue.SimpleQueue()
        self._writer = ThreadPoolExecutor(1, "pollux-snapshots")
        self._writing: Future[None] | None = None
        self._deciding_on: Snapshot | None = None
        self._idle_waiters: list[Future[None]] = []
        self._stopping_for: Future[None] | None = None
        self._thread = threading.Thread(target=self._run, name="pollux-engine", daemon=True)
        self._stopped = threading.Event()
        self._refuses_jobs = self._wound_down = False
        self._num_failures = 0
        self._unwritten: list[Callable[[float], Effects]] = []
        self._reconcile_after = -math.inf
        self.pipeline = EventPipeline(policy, backend, store, telemetry, settings, tokens, clock.now, self._refused)
        self._watch: ClockWatch | None = None
        self._begin_after_the_last_fact()
        asked = ProcessPolicy(policy, settings.long_decision_seconds)
        self._decisions = DecisionThread(asked, self.pipeline.views.board.records)

    def _begin_after_the_last_fact(self) -> None:
        """If the machine's clock was set back, go on from the time of the newest event."""
        if isinstance(self._clock, SystemClock):
            self._watch = ClockWatch(self._clock, self._store)
            behind = self._clock.advance_to(self.pipeline.newest_at)
            if behind > _WORTH_SAYING_SECONDS:
                _log.warning(
                    "the log has facts of %.0f s from now: the machine's clock was put back, or was wrong then. "
                    "Times shown are ahead by as much",
                    behind,
                )

    # Start and end

    def start(self) -> None:
        """Connect the backend, reconcile it with the log, and start the thread."""
        self._backend.start(self._add_backend_event)
        if self._watch is not None:
            self._watch.begin(self.pipeline.newest_at, self.pipeline.skip_time)
        self.pipeline.reconcile()
        self._thread.start()

    def stop(self, jobs: AtStop | None = None, timeout: float = 600.0) -> None:
        """Stop the engine. Running jobs stop with their grace and go on at the next start, or are kept running."""
        if self._stopped.is_set():
            return
        if self._thread.is_alive():
            self.wind_down(jobs or self._settings.at_stop, timeout)
            done: Future[None] = Future()
            self._queue.put(_Action(lambda: self._stop_after_run(done), done))
            done.result(timeout)
            self._thread.join(timeout)
        self._stopped.set()
        self._decisions.stop()
        self._backend.close()
        self._store.close()
        self._telemetry.close()

    def wind_down(self, jobs: AtStop, timeout: float = 600.0) -> None:
        """Accept no new jobs and start nothing; with `stop`, wait until running jobs have ended with their grace.

        Everything else is answered as before, until `stop`. A second call does nothing.
        """
        if self._wound_down:
            return
        self._refuses_jobs = self._wound_down = True
        seconds = self.stopping_seconds(jobs)
        self.read(lambda: self._begin_stopping(jobs)).result(_ANSWER_SECONDS)
        until = time.monotonic() + min(timeout, seconds)
        while jobs == "stop" and time.monotonic() < until and not self._stopped.is_set() and self._num_running():
            time.sleep(0.05)

    def stopping_seconds(self, jobs: AtStop) -> float:
        """The longest time of a stop: the longest grace of jobs with GPUs, and a little more."""
        records = self.pipeline.views.board.records.values() if jobs == "stop" else ()
        held = (record.spec.request for record in records if record.state in HOLDING)
        longest = max((request.grace_seconds for request in held if request is not None), default=0.0)
        return longest + _BEYOND_GRACE_SECONDS

    def _begin_stopping(self, jobs: AtStop) -> None:
        """Make no more decisions, and stop every running job unless they are kept."""
        self.pipeline.stopping = True
        for record in self.pipeline.controller.active.values() if jobs == "stop" else ():
            if record.state in HOLDING and record.spec.request is not None:
                try:
                    self._backend.stop(record.spec.id, record.generation, record.spec.request.grace_seconds)
                except Exception:
                    _log.exception("job '%s' could not be told to stop", record.spec.id)

    def _num_running(self) -> int:
        """The number of jobs with processes, including cancelled jobs that have not ended yet."""
        return sum(entry.state != "ended" for entry in self._backend.running())

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return self._thread.is_alive() and not self._stopped.is_set()

    @property
    def stopping(self) -> bool:
        """Whether it is stopping: it answers requests, but accepts no new jobs and starts nothing."""
        return self._refuses_jobs or self._stopped.is_set()

    def refuse_new_jobs(self) -> None:
        """Refuse new jobs from now on; `wind_down` or `stop` must follow."""
        self._refuses_jobs = True

    # Requests

    def request(self, effects: Callable[[float], Effects], reply: Callable[[], T]) -> Future[T]:
        """Make a change: `effects` returns or refuses it, `reply` returns the answer once the change is durable."""
        asked = EngineRequest(effects, reply)
        self._put(asked)
        return asked.future

    def read(self, reply: Callable[[], T]) -> Future[T]:
        """An answer that the engine's thread makes from durable state."""
        return self.request(lambda at: Effects(), reply)

    def plan(self, forecast: Forecast) -> Future[Plan]:
        """The plan for a job, made by the policy when no decision is due."""
        return self._decisions.plan(forecast)

    def _put(self, item: EngineRequest | _Action) -> None:
        if not self._stopped.is_set():
            self._queue.put(item)
        # Checked again, since the loop may just have emptied the queue for the last time.
        if self._stopped.is_set():
            _refuse(item.future)

    def _add_backend_event(self, event: BackendEvent) -> None:
        if isinstance(event, ReplicasEnded):
            self._record(lambda at: Effects(self.pipeline.run_of(event)))
        self._record(lambda at: Effects(self.pipeline.event_of(event)))

    def _refused(self, job_id: str, generation: int, why: str, own_fault: bool) -> None:
        _log.warning("job '%s' generation %d could not be started: %s", job_id, generation, why)

        def effects(at: float) -> Effects:
            record = self.pipeline.controller.jobs.get(job_id)
            if record is None or record.state not in HOLDING or record.generation != generation:
                return Effects()
            return Effects(GenerationEnded(at, job_id, generation, "crashed" if own_fault else "refused", why))

        self._record(effects)

    def _record(self, effects: Callable[[float], Effects]) -> None:
        """Record an event that is reported only once; if it cannot be written, try again later."""

        def done(future: Future[Any]) -> None:
            if isinstance(future.exception(), StoreFailed):
                self._unwritten.append(effects)

        asked = EngineRequest(effects, lambda: None)
        asked.future.add_done_callback(done)
        self._queue.put(asked)

    # For clocks of tests

    def move_clock(self, move: Callable[[], None]) -> None:
        """Call `move`, which moves the clock, in the engine's thread between two requests.

        If another thread moved it, the time would change while the engine still works on what was due.
        """
        done: Future[None] = Future()

        def run() -> None:
            move()
            done.set_result(None)

        self._put(_Action(run, done))
        done.result(_ANSWER_SECONDS)

    def wait_until_idle(self, timeout: float = 60.0) -> None:
        """Wait until no request, decision or timer is left at the present time."""
        done: Future[None] = Future()
        self._put(_Action(lambda: self._idle_waiters.append(done), done))
        done.result(timeout)

    def next_due(self) -> float | None:
        """When something is due without a request; None if nothing is."""
        return self.read(lambda: self._next_due(deciding=False)).result(_ANSWER_SECONDS)

    # The thread

    def _run(self) -> None:
        while True:
            try:
                self._run_once()
                if self._stopping_for is not None:
                    self._finish(self._stopping_for)
                    return
                self._reconcile_if_needed()
                self._answer_if_idle()
                self._num_failures = 0
            except Exception:
                _log.exception("the engine failed; it goes on with the state in the log")
                self.pipeline.must_reconcile = True
                self._num_failures += 1
                # No pause after the first failure; a series of failures must not use up the processor.
                time.sleep(min(0.05 * 2.0 ** min(self._num_failures, 10) - 0.1, _LONGEST_PAUSE_SECONDS))

    def _run_once(self) -> None:
        """Process the new requests, and do what is due."""
        requests: list[EngineRequest] = []
        for item in self._next_items():
            if isinstance(item, EngineRequest):
                requests.append(item)
            else:
                self._process(requests)
                requests = []
                item.run()
        self._process(requests)
        if self._stopping_for is not None:
            return
        if self._watch is not None:
            self._watch.look(self.pipeline.skip_time)
        self.pipeline.keep_run_times()
        while self.pipeline.fire_timer():
            pass
        self._decide_if_due()
        if self._writing is None:
            self.pipeline.save_if_due(self._write_elsewhere)

    def _next_items(self) -> list[EngineRequest | _Action]:
        """Wait until a request comes or something is due; returns the new requests."""
        due = self._next_due(self._deciding_on is not None)
        wait = None if due is None else self._clock.seconds_until(due)
        items: list[EngineRequest | _Action] = []
        with suppress(queue.Empty):
            items.append(self._queue.get(timeout=wait))
            while len(items) < _BATCH:
                items.append(self._queue.get_nowait())
        if self._unwritten and self._clock.now() >= self.pipeline.paused_until:
            unwritten, self._unwritten = self._unwritten, []
            for effects in unwritten:
                self._record(effects)
        return items

    def _next_due(self, deciding: bool) -> float | None:
        due = self.pipeline.next_due(deciding)
        if self.pipeline.must_reconcile or self._unwritten:
            due = min(self._next_attempt(), math.inf if due is None else due)
        return due

    def _next_attempt(self) -> float:
        return max(self._reconcile_after, self.pipeline.paused_until)

    def _process(self, requests: list[EngineRequest]) -> None:
        """Process requests. Bugs in Pollux become errors of their callers; everything else is still done."""
        try:
            if requests:
                self.pipeline.process(requests)
        except Exception as error:
            _log.exception("requests failed; the state in the log counts")
            self.pipeline.must_reconcile = True
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(our_fault(error))

    def _decide_if_due(self) -> None:
        if self._deciding_on is not None:
            return
        snapshot = self.pipeline.due_snapshot()
        if snapshot is not None:
            due = self.pipeline.controller.next_decision_at or snapshot.now
            self._deciding_on = snapshot
            self._decisions.decide(snapshot, lambda: self.pipeline.note_decision_begins(due), self._decided)

    def _decided(self, result: DecisionResult) -> None:
        """Called by the policy's thread."""
        self._queue.put(_Action(lambda: self._apply_decision(result)))

    def _apply_decision(self, result: DecisionResult) -> None:
        self._deciding_on = None
        if self.pipeline.stopping:
            return
        try:
            self.pipeline.apply_decision(result.snapshot, result.decision, result.seconds)
        except Exception:
            _log.exception("a decision could not be applied; the next one follows")
            self.pipeline.must_reconcile = True

    def _write_elsewhere(self, work: Callable[[], None]) -> None:
        """Write a snapshot while requests are answered; one at a time."""

        def done(future: Future[None]) -> None:
            self._writing = None
            self._queue.put(_Action(lambda: None))

        self._writing = self._writer.submit(work)
        self._writing.add_done_callback(done)

    def _reconcile_if_needed(self) -> None:
        if not self.pipeline.must_reconcile or self._clock.now() < self._next_attempt():
            return
        try:
            self.pipeline.reconcile()
        except Exception:
            _log.exception("the backend could not be reconciled with the log; it is tried again")
            self.pipeline.must_reconcile = True
            self._reconcile_after = self._clock.now() + _LONGEST_PAUSE_SECONDS

    def _answer_if_idle(self) -> None:
        busy = self._deciding_on is not None or self._writing is not None or not self._queue.empty()
        if busy or not self._idle_waiters:
            return
        due = self._next_due(deciding=False)
        if due is None or due > self._clock.now():
            for future in self._idle_waiters:
                future.set_result(None)
            self._idle_waiters = []

    def _stop_after_run(self, done: Future[None]) -> None:
        self._stopping_for = done

    def _finish(self, stop: Future[None]) -> None:
        self._stopped.set()
        self._writer.shutdown(wait=True)
        try:
            self.pipeline.close()
        except Exception:
            _log.exception("the state could not be saved at the end; the log is complete")
        with suppress(queue.Empty):
            while True:
                _refuse(self._queue.get_nowait().future)
        for future in self._idle_waiters:
            _refuse(future)
        stop.set_result(None)


def _refuse(future: Future[Any]) -> None:
    with suppress(InvalidStateError):
        future.set_exception(Unreachable(STOPPING))
