"""What happens to an event: apply it, append it to the log, answer the request, execute the commands.

One thread calls this; there is no lock in here. Threads, queues and the waiting are in `loop`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pollux.backends.protocol import Backend, BackendEvent, ReplicasEnded
from pollux.controller import (
    ENDED,
    DecisionMade,
    Event,
    GenerationEnded,
    JobRan,
    JobsForgotten,
    NodeAdded,
    NodeRemoved,
    NodeSetAside,
    StopJob,
    TimerFired,
    TimeSkipped,
)
from pollux.controller.state.cluster_state import time_up
from pollux.core import Decision, Policy, Snapshot
from pollux.core.errors import PolluxError, StoreFailed
from pollux.service.auth.tokens import Tokens
from pollux.service.clocks.run_times import RunTimes
from pollux.service.engine.autoscaling import desired_num_nodes, is_job_waiting
from pollux.service.engine.backend_events import event_of, is_late_end
from pollux.service.engine.executor import Executor, Refused, reconcile, stopped_at
from pollux.service.engine.requests import Batch, Effects, EngineRequest, our_fault
from pollux.service.engine.snapshots import Snapshots
from pollux.service.settings import ServiceSettings
from pollux.service.views.projector import Projector
from pollux.store.protocol import Store, Telemetry, TelemetryRow

__all__ = ["EventPipeline", "LastDecision"]

_log = logging.getLogger("pollux.service")

# After a failed write the engine starts nothing on its own for this time, which doubles with each further failure.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
# Requests must not wait until thousands of jobs are forgotten.
_FORGOTTEN_AT_ONCE = 100


@dataclass(slots=True)
class LastDecision:
    """When the last decision was made, how long the policy took, and how late it began; None before the first."""

    at: float | None = None
    seconds: float | None = None
    delay_seconds: float = 0.0


class EventPipeline:
    """The controller with its store, its backend and the views."""

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        store: Store,
        telemetry: Telemetry,
        settings: ServiceSettings,
        tokens: Tokens,
        clock: Callable[[], float],
        refused: Refused,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.settings = settings
        self.views = Projector(telemetry)
        self.last_decision = LastDecision()
        self.stopping = False
        self.must_reconcile = False
        self.paused_until = -math.inf
        self._pause_seconds = 0.0
        self._store = store
        self._telemetry = telemetry
        self._clock = clock
        self._executor = Executor(backend, settings, tokens, policy.batch, refused)
        self._snapshots = Snapshots(store, settings, clock)
        self._last_at = 0.0
        # When the newest fact of earlier services happened.
        self.newest_at = 0.0
        self._is_sound = self._is_first = True
        self._run_times = RunTimes(backend)
        self.controller = self._snapshots.load(self.now, self._replay)

    def _replay(self, revision: int, event: Event) -> None:
        self.newest_at = max(self.newest_at, event.at)
        self._last_at = max(self._last_at, event.at)
        self.views.replay(revision, event)

    def reconcile(self) -> None:
        """Make the backend run what the log says, at the start and whenever the two may differ."""
        self.must_reconcile = False
        self._take_inventory()
        for ended in reconcile(self.controller.jobs, self.backend.running()).ended:
            self._record(self.run_of(ended))
            self._record(self.event_of(ended))
        # Ends go first, since a job that is done must not start again.
        todo = reconcile(self.controller.jobs, self.backend.running())
        for job_id, generation in todo.stop:
            record = self.controller.jobs.get(job_id)
            if record is None:
                self.backend.stop(job_id, generation, 0.0)
            else:
                self._executor.stop(record, generation)
        for job_id in todo.forget:
            self.backend.forget(job_id)
        if not self.stopping:
            for record in todo.start:
                if self._is_first:
                    # The machine may have been off: nobody knows how long the job ran after the last fact.
                    self._record(self._run_times.known(record, self.now(), self.newest_at))
                since = stopped_at(record, self.now())
                self._executor.start(record, record.generation, record.placement, stopped_at=since)
            for record in todo.change:
                self._executor.start(record, record.generation, record.placement, live=True)
        self._is_first = False
        self.views.show_all(self.controller, self.now())

    def _take_inventory(self) -> None:
        found = {node.id: node for node in self.backend.inventory()}
        for node in list(self.controller.cluster.nodes):
            if node.id not in found:
                self._record(NodeRemoved(self.now(), node.id))
        for node in found.values():
            if self.controller.cluster.by_id.get(node.id) != node:
                self._record(NodeAdded(self.now(), node))

    def _record(self, event: Event | None) -> None:
        """Process an event without a caller."""
        if event is not None:
            self.process([EngineRequest(lambda at: Effects(event), lambda: None)])

    # The life of an event

    def now(self) -> float:
        """The clock's time, at least that of the newest event, since events are in order of time."""
        self._last_at = max(self._last_at, self._clock())
        return self._last_at

    def skip_time(self, seconds: float, away: bool) -> bool:
        """Leave out seconds by which the clock will jump, or did while no service ran; returns whether it did."""
        at = self.now() if away else self.now() + seconds
        asked = EngineRequest(lambda _: Effects(TimeSkipped(at, seconds, away)), lambda: None)
        self.process([asked])
        return asked.future.exception(timeout=0) is None

    def process(self, requests: Sequence[EngineRequest]) -> None:
        """Apply the requests, write all facts at once, answer, and execute the commands."""
        now = self.now()
        # Requests whose callers no longer wait are dropped here, and not later.
        requests = [request for request in requests if request.future.set_running_or_notify_cancel()]
        try:
            self._reload_if_unsound()
        except PolluxError as error:
            self._pause()
            for request in requests:
                request.future.set_exception(error)
            return
        batch = self._applied(requests, now)
        try:
            self._write(batch.events, batch.rows)
            self.must_reconcile = self.must_reconcile or not self._is_sound
            self._reload_if_unsound()
        except PolluxError as error:
            self._undo(batch, error)
            return
        self._publish(batch, now)
        self._answer(batch.accepted)
        self._execute(batch, now)
        if any(isinstance(event, GenerationEnded) for event in batch.events):
            self._set_suspects_aside()

    def _applied(self, requests: Sequence[EngineRequest], now: float) -> Batch:
        """The requests that the controller accepted; the others are answered with their errors."""
        batch = Batch()
        for request in requests:
            try:
                batch.add(request, self.controller, now)
            except PolluxError as error:
                request.future.set_exception(error)
            except Exception as error:
                _log.exception("a request failed")
                self._is_sound = False
                request.future.set_exception(our_fault(error))
        return batch

    def _set_suspects_aside(self) -> None:
        """Write the fact for each node on which jobs fail again and again."""
        for node_id, why in self.controller.suspects():
            _log.warning("node '%s' is set aside: %s", node_id, why)
            self._record(NodeSetAside(self.now(), node_id, why))

    def _write(self, events: Sequence[Event], rows: Sequence[TelemetryRow]) -> None:
        predictions = self.views.etas.pop_pending()
        if rows or predictions:
            try:
                self._telemetry.record([*predictions, *rows])
            except PolluxError as error:
                if rows:
                    raise
                _log.warning("predictions could not be stored: %s", error)
        if events:
            self._store.append(events)
            self.paused_until, self._pause_seconds = -math.inf, 0.0

    def _pause(self) -> None:
        """Start nothing for a while. Requests are still tried: they show when writing is possible again."""
        self._pause_seconds = min(max(2.0 * self._pause_seconds, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        self.paused_until = self.now() + self._pause_seconds

    def _reload_if_unsound(self) -> None:
        """After a bug in Pollux the state may be inconsistent: restore it from the log."""
        if not self._is_sound:
            self.controller = self._snapshots.load(self.now)
            self._is_sound = True

    def _undo(self, batch: Batch, error: PolluxError) -> None:
        """Restore the state from the log, which has no event of this batch. Requests that only read are answered."""
        _log.error("facts could not be written: %s", error)
        self._pause()
        failure = error if isinstance(error, StoreFailed) else StoreFailed(str(error))
        self._is_sound = False
        try:
            self._reload_if_unsound()
            self.views.show_all(self.controller, self.now())
            self._answer(batch.reading)
        except PolluxError as still:
            _log.error("the log could not be read either: %s", still)
        for request in batch.accepted:
            if not request.future.done():
                request.future.set_exception(failure)

    def _publish(self, batch: Batch, now: float) -> None:
        """Update the views with durable events."""
        self.views.project(batch.events, batch.rows, self.controller, now, self._store.revision)
        for event in batch.events:
            if isinstance(event, GenerationEnded):
                self._forget_if_over(event.job_id)

    def _forget_if_over(self, job_id: str) -> None:
        record = self.controller.jobs.get(job_id)
        if record is None or record.state in ENDED:
            try:
                self.backend.forget(job_id)
            except Exception:
                # The backend's entry for the job costs some memory until the next start, which tries again.
                _log.exception("the backend could not forget job '%s'", job_id)

    def _answer(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            try:
                request.future.set_result(request.reply())
            except PolluxError as error:
                request.future.set_exception(error)
            except Exception as error:
                _log.exception("an answer failed")
                request.future.set_exception(our_fault(error))

    def _execute(self, batch: Batch, now: float) -> None:
        for commands in batch.commands:
            if self.stopping:
                commands = [command for command in commands if isinstance(command, StopJob)]
            if not self._executor.execute(commands, self.controller.jobs, now):
                self.must_reconcile = True

    def event_of(self, heard: BackendEvent) -> Event | None:
        """The controller's event for a report of the backend; None if it has no news."""
        if is_late_end(heard, self.controller):
            self._forget_if_over(getattr(heard, "job_id", ""))
        return event_of(heard, self.now(), self.controller, self.views.reported_done)

    def run_of(self, heard: BackendEvent) -> JobRan | None:
        """How long ended replicas ran, if the clock shows another time; this event comes before their end."""
        record = self.controller.jobs.get(heard.job_id) if isinstance(heard, ReplicasEnded) else None
        if record is None or not isinstance(heard, ReplicasEnded) or heard.generation != record.generation:
            return None
        return self._run_times.corrected(record, self.now())

    # Decisions and timers

    def due_snapshot(self) -> Snapshot | None:
        """The snapshot to decide on, if a decision is due."""
        due = self.controller.next_decision_at
        now = self.now()
        if self.stopping or due is None or max(due, self.paused_until) > now:
            return None
        return self.controller.snapshot(now)

    def note_decision_begins(self, due: float) -> None:
        """Note how late the policy begins with a decision that was `due`. Called by the policy's thread."""
        self.last_decision.delay_seconds = max(self._clock() - due, 0.0)

    def fire_timer(self) -> bool:
        """Let the controller's timer fire if its time has come."""
        due = self.controller.next_timer_at
        if self.stopping or due is None or max(due, self.paused_until) > self.now():
            return False
        limits = ((record, time_up(record)) for record in self.controller.active.values())
        reached = [record for record, limit in limits if limit is not None and limit <= self.now()]
        runs = [ran for record in reached if (ran := self._run_times.corrected(record, self.now())) is not None]
        for ran in runs:
            self._record(ran)
        if not runs:
            self._record(TimerFired(self.now()))
        return True

    def keep_run_times(self) -> None:
        """Every few minutes, write as facts how long jobs with a time limit have run."""
        for ran in [] if self.stopping else self._run_times.to_keep(self.controller.active.values(), self.now()):
            self._record(ran)

    def apply_decision(self, snapshot: Snapshot, decision: Decision | None, seconds: float) -> None:
        """Apply a decision; None or an invalid one changes nothing until the next decision."""
        self.last_decision.at, self.last_decision.seconds = self.now(), seconds
        answer = Decision({}) if decision is None else self.controller.narrowed(decision)
        request = self._decision(snapshot.revision, answer)
        self.process([request])
        failed = request.future.exception(timeout=0)
        if failed is None:
            if decision is not None:
                self.controller.remember(decision.memory)
        elif not isinstance(failed, StoreFailed):
            _log.error("policy '%s' made an invalid decision: %s", self.policy.name, failed)
            self.process([self._decision(snapshot.revision, Decision({}))])
        desired = None if decision is None or failed is not None else decision.desired_nodes
        jobs = self.controller.active.values()
        self.backend.desire(desired_num_nodes(jobs, self.controller.cluster, desired), is_job_waiting(jobs))

    def _decision(self, revision: int, decision: Decision) -> EngineRequest:
        return EngineRequest(lambda at: Effects(DecisionMade(at, revision, decision, partial=True)), lambda: None)

    def next_due(self, deciding: bool) -> float | None:
        """When something is due without a request; after a failed write, when the pause is over."""
        if self.stopping:
            return None
        times = [self.controller.next_timer_at, None if deciding else self.controller.next_decision_at]
        due = min((at for at in times if at is not None), default=None)
        return None if due is None else max(due, self.paused_until)

    # Snapshots of the state

    def save_if_due(self, run_elsewhere: Callable[[Callable[[], None]], None]) -> None:
        """Write a snapshot if one is due; writing takes long and is given to `run_elsewhere`."""
        if self._snapshots.is_due:
            self._forget_old_jobs()
            run_elsewhere(self._writing())

    def _writing(self) -> Callable[[], None]:
        return self._snapshots.writing(self.controller, self.now() - self.settings.keep_facts_seconds)

    def _forget_old_jobs(self) -> None:
        """Forget jobs that ended before the facts that are kept, the oldest first, a limited number at once."""
        before = self.now() - self.settings.keep_facts_seconds
        over = [record for record in self.controller.jobs.values() if record.is_over(before)]
        if over:
            ends = sorted(record.ended_at or 0.0 for record in over)
            before = min(before, math.nextafter(ends[min(len(ends), _FORGOTTEN_AT_ONCE) - 1], math.inf))
            self._record(JobsForgotten(self.now(), before))
            for record in over:
                self._forget_measurements(record.spec.id)

    def _forget_measurements(self, job_id: str) -> None:
        if job_id not in self.controller.jobs:
            try:
                self._telemetry.forget(job_id)
            except PolluxError as error:
                _log.warning("the measurements of job '%s' could not be deleted: %s", job_id, error)

    def save(self) -> None:
        """Write a snapshot now, unless the newest one is complete."""
        if self._snapshots.is_behind:
            self._writing()()

    def close(self) -> None:
        """Write the last measurements."""
        try:
            self._write([], [])
        except PolluxError as error:
            _log.warning("the last measurements could not be stored: %s", error)
        self.save()
