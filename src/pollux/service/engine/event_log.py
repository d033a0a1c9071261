"""The life of a fact: apply, append, answer, execute. One thread calls this; there is no lock in here.

Threads, queues and the waiting are in `engine`; what people are shown is in `job_board`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pollux.backends.protocol import (
    Backend,
    BackendEvent,
    NodeDown,
    NodeUp,
    ReplicasEnded,
    ReplicasLost,
    ReplicasStarted,
)
from pollux.controller import (
    ENDED,
    HOLDING,
    Command,
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobRunning,
    JobsForgotten,
    JobState,
    NodeAdded,
    NodeRemoved,
    StopJob,
    TimerFired,
)
from pollux.controller.state.costs import LIVE_KINDS
from pollux.core import Cluster, Decision, Policy, Snapshot
from pollux.core.errors import PolluxError, StoreFailed
from pollux.service.auth.tokens import Tokens
from pollux.service.engine.autoscaling import nodes_wanted, somebody_waits
from pollux.service.engine.executor import Executor, Refused, reconcile, stopped_at
from pollux.service.settings import ServiceSettings
from pollux.service.views.job_events import Feed
from pollux.service.views.projector import Desk
from pollux.store.protocol import SavedState, Store, Telemetry, TelemetryRow

__all__ = ["Ask", "Facts", "Runner", "our_fault"]

_log = logging.getLogger("pollux.service")

# After a failed write, nothing is begun by itself for this long; twice as long after the next failure.
_FIRST_HOLD_SECONDS = 1.0
_LONGEST_HOLD_SECONDS = 30.0
# Nobody shall wait for the rest of thousands.
_FORGOTTEN_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Facts:
    """What an ask brings: an event for the controller, rows for the telemetry, or neither."""

    event: Event | None = None
    rows: tuple[TelemetryRow, ...] = ()


@dataclass(slots=True)
class Ask:
    """Something to be done in the engine's thread.

    `facts` is called with the time and may refuse; `reply` is called when everything is durable.
    """

    facts: Callable[[float], Facts]
    reply: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


@dataclass(slots=True)
class _Batch:
    """What several asks bring together; `good` are those that were not refused, `lookers` those that bring nothing."""

    events: list[Event] = field(default_factory=list)
    rows: list[TelemetryRow] = field(default_factory=list)
    commands: list[list[Command]] = field(default_factory=list)
    good: list[Ask] = field(default_factory=list)
    lookers: list[Ask] = field(default_factory=list)

    def add(self, ask: Ask, controller: Controller, now: float) -> None:
        """Let the controller take in what the ask brings, or refuse it."""
        facts = ask.facts(now)
        if facts.event is not None:
            self.commands.append(controller.apply(facts.event))
            self.events.append(facts.event)
        self.rows.extend(facts.rows)
        self.good.append(ask)
        if facts.event is None and not facts.rows:
            self.lookers.append(ask)


def our_fault(error: Exception) -> PolluxError:
    """What a caller is told of a mistake of ours."""
    return PolluxError(f"the service failed inside: {error!r}; its log has the whole story")


class Runner:
    """The controller with its store, backend and the board of what people see."""

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        store: Store,
        telemetry: Telemetry,
        settings: ServiceSettings,
        tokens: Tokens,
        now: Callable[[], float],
        refused: Refused,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.settings = settings
        self.desk = Desk(telemetry)
        self.feed = Feed()
        self.stopping = False
        self.doubtful = False
        self.last_decision_at: float | None = None
        self.decision_seconds: float | None = None
        self.latest_decision_delay = 0.0
        self._store = store
        self._telemetry = telemetry
        self._clock = now
        self._executor = Executor(backend, settings, tokens, policy.batch, refused)
        self._last_at = 0.0
        self._saved_revision = 0
        self._saved_at = now()
        self._save_after = self.held_until = -math.inf
        self._hold_seconds = 0.0
        self._is_sound = True
        self.controller = self._load(first=True)

    # Start

    def _load(self, first: bool) -> Controller:
        """The controller as the log has it: the newest snapshot and what came after."""
        settings = ControllerSettings(
            trigger=self.settings.trigger,
            interval_seconds=self.settings.interval_seconds,
            min_gap_seconds=self.settings.min_gap_seconds,
            seed=self.settings.seed,
        )
        saved = self._store.load()
        if saved is None:
            controller = Controller(Cluster(()), settings)
            controller.begin(self._began_at())
        else:
            controller = Controller.restored(saved.state, settings)
            self._saved_revision = saved.revision
        after = 0 if first or saved is None else saved.revision
        for revision, event in self._store.read(after):
            if saved is None or revision > saved.revision:
                controller.apply(event)
            self._last_at = max(self._last_at, event.at)
            if first:
                self.desk.tell(event)
                self.feed.start_at(revision, event)
        if controller.next_decision_at is None:
            controller.begin(self.now())  # rounds that were not running before, such as after a change of trigger
        return controller

    def _began_at(self) -> float:
        """When the clock of rounds was started: kept, so that a restart does not shift the rounds."""
        kept = self._store.setting("began_at")
        if kept is None:
            kept = repr(self.now())
            self._store.set_setting("began_at", kept)
        return float(kept)

    def reconcile(self) -> None:
        """Bring the backend to what the log says: once it has started, and whenever that is `doubtful`."""
        self.doubtful = False
        self._take_inventory()
        for ended in reconcile(self.controller.jobs, self.backend.running()).ended:
            self._quietly(self.heard(ended))
        # An end changes what else there is to do: who is through starts no more.
        todo = reconcile(self.controller.jobs, self.backend.running())
        for job_id, generation in todo.stop:
            record = self.controller.jobs.get(job_id)
            if record is None:
                self.backend.stop(job_id, generation, 0.0)
            else:
                self._executor.stop(record, generation)
        for job_id in todo.forget:
            self.backend.forget(job_id)
        for record in todo.start if not self.stopping else ():
            self._executor.start(record, record.generation, record.placement, stopped_at=stopped_at(record, self.now()))
        for record in todo.change if not self.stopping else ():
            self._executor.start(record, record.generation, record.placement, live=True)
        self.desk.show_all(self.controller, self.now())

    def _take_inventory(self) -> None:
        there = {node.id: node for node in self.backend.inventory()}
        for node in list(self.controller.cluster.nodes):
            if node.id not in there:
                self._quietly(NodeRemoved(self.now(), node.id))
        for node in there.values():
            if self.controller.cluster.by_id.get(node.id) != node:
                self._quietly(NodeAdded(self.now(), node))

    def _quietly(self, event: Event | None) -> None:
        """A fact that nobody waits for."""
        if event is not None:
            self.take([Ask(lambda at: Facts(event), lambda: None)])

    # The life of a fact

    @property
    def newest_at(self) -> float:
        """When the newest fact happened; 0 where there is none."""
        return self._last_at

    def now(self) -> float:
        """The clock, never going back: facts are in the order of their times."""
        self._last_at = max(self._last_at, self._clock())
        return self._last_at

    def take(self, asks: Sequence[Ask]) -> None:
        """Apply what is asked, write all of it at once, answer, and carry the commands out."""
        now = self.now()
        # Who gave up waiting is not served any more; from here on nobody can.
        asks = [ask for ask in asks if ask.future.set_running_or_notify_cancel()]
        try:
            self._mend()
        except PolluxError as error:
            self._hold()
            for ask in asks:
                ask.future.set_exception(error)
            return
        batch = _Batch()
        for ask in asks:
            try:
                batch.add(ask, self.controller, now)
            except PolluxError as error:
                ask.future.set_exception(error)
            except Exception as error:
                _log.exception("a request failed")
                self._is_sound = False
                ask.future.set_exception(our_fault(error))
        try:
            self._write(batch.events, batch.rows)
            self.doubtful = self.doubtful or not self._is_sound
            self._mend()
        except PolluxError as error:
            self._undo(batch, error)
            return
        self._settle(batch.events, batch.rows, now)
        self._answer(batch.good)
        for commands in batch.commands:
            if self.stopping:
                commands = [command for command in commands if isinstance(command, StopJob)]
            if not self._executor.execute(commands, self.controller.jobs, now):
                self.doubtful = True

    def _write(self, events: Sequence[Event], rows: Sequence[TelemetryRow]) -> None:
        pending = self.desk.etas.take_pending()
        if rows or pending:
            try:
                self._telemetry.record([*pending, *rows])
            except PolluxError as error:
                if rows:
                    raise
                _log.warning("predictions could not be kept: %s", error)
        if events:
            self._store.append(events)
            self.held_until, self._hold_seconds = -math.inf, 0.0

    def _hold(self) -> None:
        """Begin nothing by itself for a while: what can be written now is seen by those who ask for it."""
        self._hold_seconds = min(max(2.0 * self._hold_seconds, _FIRST_HOLD_SECONDS), _LONGEST_HOLD_SECONDS)
        self.held_until = self.now() + self._hold_seconds

    def _mend(self) -> None:
        """A mistake of ours may have left half a change behind: only what the log has counts."""
        if not self._is_sound:
            self.controller = self._load(first=False)
            self._is_sound = True

    def _undo(self, batch: _Batch, error: PolluxError) -> None:
        """No fact of this batch happened: back to what the log has. Who only looks is answered all the same."""
        _log.error("facts could not be written: %s", error)
        self._hold()
        failure = error if isinstance(error, StoreFailed) else StoreFailed(str(error))
        self._is_sound = False
        try:
            self._mend()
            self.desk.show_all(self.controller, self.now())
            self._answer(batch.lookers)
        except PolluxError as still:
            _log.error("nor could the log be read: %s", still)
        for ask in batch.good:
            if not ask.future.done():
                ask.future.set_exception(failure)

    def _settle(self, events: Sequence[Event], rows: Sequence[TelemetryRow], now: float) -> None:
        """What people see follows what is durable."""
        last = self._store.revision
        self.desk.took(events, rows, self.controller, now)
        if events:
            self.feed.publish(zip(range(last - len(events) + 1, last + 1), events, strict=True))
        for event in events:
            if isinstance(event, GenerationEnded):
                self._forget_if_over(event.job_id)

    def _forget_if_over(self, job_id: str) -> None:
        record = self.controller.jobs.get(job_id)
        if record is None or record.state in ENDED:
            try:
                self.backend.forget(job_id)
            except Exception:
                # What is kept of it costs some memory; the next start tries again.
                _log.exception("the backend could not forget job '%s'", job_id)

    def _answer(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            try:
                ask.future.set_result(ask.reply())
            except PolluxError as error:
                ask.future.set_exception(error)
            except Exception as error:
                _log.exception("an answer failed")
                ask.future.set_exception(our_fault(error))

    # What the backend says

    def heard(self, told: BackendEvent) -> Event | None:
        """The fact in what a backend tells; None for echoes of what is known."""
        at = self.now()
        if isinstance(told, NodeUp):
            return None if self.controller.cluster.by_id.get(told.node.id) == told.node else NodeAdded(at, told.node)
        if isinstance(told, NodeDown):
            return NodeRemoved(at, told.node_id) if told.node_id in self.controller.cluster.by_id else None
        if not isinstance(told, ReplicasStarted | ReplicasLost | ReplicasEnded):
            return None
        record = self.controller.jobs.get(told.job_id)
        if record is None or record.state in ENDED:
            if isinstance(told, ReplicasEnded):
                self._forget_if_over(told.job_id)
            return None
        current = told.generation == record.generation
        if isinstance(told, ReplicasStarted):
            starts = current and record.state in (JobState.STARTING, JobState.RESIZING)
            return JobRunning(at, told.job_id, told.generation, *_pause(told)) if starts else None
        if isinstance(told, ReplicasLost):
            lost = current and record.state in HOLDING and told.remaining != record.placement
            facts = (told.job_id, told.generation, told.remaining, told.detail, told.refused, told.withdrawn)
            return GenerationShrunk(at, *facts) if lost else None
        outcome = "succeeded" if self._was_through(told) else told.outcome
        if current or outcome == "succeeded":
            return GenerationEnded(at, told.job_id, told.generation, outcome, told.detail)
        return None

    def _was_through(self, ended: ReplicasEnded) -> bool:
        """Whether a job that was told to stop had come to its end by then, as its agent said."""
        well = bool(ended.exits) and all(each.code == 0 for each in ended.exits)
        return ended.outcome == "stopped" and well and self.desk.said_done(ended.job_id, ended.generation)

    # Decisions and timers

    def due_snapshot(self) -> Snapshot | None:
        """The snapshot to decide on, if a decision is due."""
        due = self.controller.next_decision_at
        now = self.now()
        if self.stopping or due is None or max(due, self.held_until) > now:
            return None
        return self.controller.snapshot(now)

    def thinking_begins(self, due: float) -> None:
        """The policy begins to think about a decision that was `due`: so late is it. Called by its thread."""
        self.latest_decision_delay = max(self._clock() - due, 0.0)

    def fire_timer(self) -> bool:
        """Let the controller's timer fire if its time has come."""
        due = self.controller.next_timer_at
        if self.stopping or due is None or max(due, self.held_until) > self.now():
            return False
        self._quietly(TimerFired(self.now()))
        return True

    def decided(self, snapshot: Snapshot, decision: Decision | None, seconds: float) -> None:
        """Take a policy's answer in; None, or one that does not hold, changes nothing until the next decision."""
        self.last_decision_at, self.decision_seconds = self.now(), seconds
        answer = Decision({}) if decision is None else self.controller.narrowed(decision)
        ask = self._decision(snapshot.revision, answer)
        self.take([ask])
        failed = ask.future.exception(timeout=0)
        if failed is None:
            if decision is not None:
                self.controller.remember(decision.memory)
        elif not isinstance(failed, StoreFailed):
            _log.error("policy '%s' gave a decision that cannot be: %s", self.policy.name, failed)
            self.take([self._decision(snapshot.revision, Decision({}))])
        desired = None if decision is None or failed is not None else decision.desired_nodes
        jobs = self.controller.active.values()
        self.backend.desire(nodes_wanted(jobs, self.controller.cluster, desired), somebody_waits(jobs))

    def _decision(self, revision: int, decision: Decision) -> Ask:
        return Ask(lambda at: Facts(DecisionMade(at, revision, decision, partial=True)), lambda: None)

    def next_due(self, deciding: bool) -> float | None:
        """When something has to be done by itself; after a failed write, not before the pause that follows is over."""
        if self.stopping:
            return None
        times = [self.controller.next_timer_at, None if deciding else self.controller.next_decision_at]
        due = min((at for at in times if at is not None), default=None)
        return None if due is None else max(due, self.held_until)

    # Snapshots of the state

    def save_if_due(self, elsewhere: Callable[[Callable[[], None]], None]) -> None:
        """Keep a snapshot every so many facts or minutes; writing it takes long and is done `elsewhere`."""
        behind = self._store.revision - self._saved_revision
        old = self._clock() - self._saved_at >= self.settings.snapshot_every_seconds
        if self._clock() < self._save_after:
            return
        if behind >= self.settings.snapshot_every_facts or (behind > 0 and old):
            self._forget_old()
            elsewhere(self._saving())

    def _forget_old(self) -> None:
        """Let jobs go that ended before the facts that are kept, the oldest first, so many at once."""
        before = self.now() - self.settings.keep_facts_seconds
        over = [record for record in self.controller.jobs.values() if record.is_over(before)]
        if over:
            ends = sorted(record.ended_at or 0.0 for record in over)
            before = min(before, math.nextafter(ends[min(len(ends), _FORGOTTEN_AT_ONCE) - 1], math.inf))
            self._quietly(JobsForgotten(self.now(), before))
            for record in over:
                self._forget_measurements(record.spec.id)

    def _forget_measurements(self, job_id: str) -> None:
        if job_id not in self.controller.jobs:
            try:
                self._telemetry.forget(job_id)
            except PolluxError as error:
                _log.warning("the measurements of job '%s' could not be dropped: %s", job_id, error)

    def save(self) -> None:
        """Keep a snapshot now."""
        if self._store.revision != self._saved_revision:
            self._saving()()

    def _saving(self) -> Callable[[], None]:
        """What is left to do for a snapshot of this moment; it may be done in any thread."""
        saved = SavedState(self._store.revision, self.controller.state())
        keep_after = self.now() - self.settings.keep_facts_seconds

        def write() -> None:
            try:
                self._store.save(saved)
                self._saved_at, self._saved_revision = self._clock(), saved.revision
                self._store.trim(keep_after)
            except PolluxError as error:
                self._save_after = self._clock() + _LONGEST_HOLD_SECONDS
                _log.warning("no snapshot of the state could be kept: %s", error)

        return write

    def close(self) -> None:
        """Keep what is not kept yet."""
        try:
            self._write([], [])
        except PolluxError as error:
            _log.warning("the last measurements could not be kept: %s", error)
        self.save()


def _pause(told: ReplicasStarted) -> tuple[float | None, str]:
    """What a change took, if that can be: a replica may write anything."""
    seconds = told.pause_seconds
    sound = isinstance(seconds, int | float) and math.isfinite(seconds) and seconds >= 0 and told.kind in LIVE_KINDS
    return (float(seconds), told.kind) if sound and seconds is not None else (None, "")
