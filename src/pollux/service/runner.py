"""The life of a fact: apply, append, answer, execute. One thread calls this; there is no lock in here.

Threads, queues and the waiting are in `engine`; what people are shown is in `board`.
"""

from __future__ import annotations

import logging
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
    ReplicasStarted,
)
from pollux.controller import (
    ENDED,
    Command,
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    GenerationEnded,
    JobRunning,
    JobState,
    NodeAdded,
    NodeRemoved,
    TimerFired,
)
from pollux.core import Cluster, Decision, Policy, Snapshot
from pollux.core.errors import PolluxError, StoreFailed
from pollux.service.desk import Desk
from pollux.service.executor import Executor, reconcile
from pollux.service.settings import ServiceSettings
from pollux.service.story import Feed
from pollux.service.tokens import Tokens
from pollux.store.protocol import SavedState, Store, Telemetry, TelemetryRow

__all__ = ["Ask", "Facts", "Runner", "our_fault"]

_log = logging.getLogger("pollux.service")


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
        refused: Callable[[str, int, str], None],
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.settings = settings
        self.desk = Desk(telemetry)
        self.feed = Feed()
        self.stopping = False
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
        after = 0 if first else self._saved_revision
        for revision, event in self._store.read(after):
            if saved is None or revision > saved.revision:
                controller.apply(event)
            self._last_at = max(self._last_at, event.at)
            if first:
                self.desk.story.add(event)
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
        """Bring the backend to what the log says; called once, after the backend has started."""
        self._take_inventory()
        running = self.backend.running()
        todo = reconcile(self.controller.jobs, running)
        for job_id, generation in todo.stop:
            record = self.controller.jobs.get(job_id)
            if record is None:
                self.backend.stop(job_id, generation, 0.0)
            else:
                self._executor.stop(record, generation)
        for ended in todo.ended:
            self._quietly(self.heard(ended))
        for job_id in todo.forget:
            self.backend.forget(job_id)
        for record in todo.start:
            self._executor.start(record, record.generation, record.placement)
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

    def now(self) -> float:
        """The clock, never going back: facts are in the order of their times."""
        self._last_at = max(self._last_at, self._clock())
        return self._last_at

    def take(self, asks: Sequence[Ask]) -> None:
        """Apply what is asked, write all of it at once, answer, and carry the commands out."""
        now = self.now()
        events: list[Event] = []
        rows: list[TelemetryRow] = []
        commands: list[list[Command]] = []
        good: list[Ask] = []
        sound = True
        for ask in asks:
            try:
                facts = ask.facts(now)
                if facts.event is not None:
                    commands.append(self.controller.apply(facts.event))
                    events.append(facts.event)
                rows.extend(facts.rows)
                good.append(ask)
            except PolluxError as error:
                ask.future.set_exception(error)
            except Exception as error:
                _log.exception("a request failed")
                sound = False
                ask.future.set_exception(our_fault(error))
        try:
            self._write(events, rows)
        except PolluxError as error:
            self._undo(good, error)
            return
        if not sound:
            # A mistake of ours may have left half a change behind: only what the log has counts.
            self.controller = self._load(first=False)
        self._settle(events, rows, now)
        self._answer(good)
        for of_one_event in commands:
            self._executor.execute(of_one_event, self.controller.jobs, now)

    def _write(self, events: Sequence[Event], rows: Sequence[TelemetryRow]) -> None:
        rows = [*self.desk.etas.take_pending(), *rows]
        if rows:
            self._telemetry.record(rows)
        if events:
            self._store.append(events)

    def _undo(self, asks: Sequence[Ask], error: PolluxError) -> None:
        """Nothing of this batch happened: back to what the log has."""
        _log.error("facts could not be written: %s", error)
        self.controller = self._load(first=False)
        self.desk.show_all(self.controller, self.now())
        failure = error if isinstance(error, StoreFailed) else StoreFailed(str(error))
        for ask in asks:
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
            self.backend.forget(job_id)

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
        if not isinstance(told, ReplicasStarted | ReplicasEnded):
            return None
        record = self.controller.jobs.get(told.job_id)
        if record is None or record.state in ENDED:
            if isinstance(told, ReplicasEnded):
                self._forget_if_over(told.job_id)
            return None
        current = told.generation == record.generation
        if isinstance(told, ReplicasStarted):
            starts = current and record.state in (JobState.STARTING, JobState.RESIZING)
            return JobRunning(at, told.job_id, told.generation) if starts else None
        if current or told.outcome == "succeeded":
            return GenerationEnded(at, told.job_id, told.generation, told.outcome, told.detail)
        return None

    # Decisions and timers

    def due_snapshot(self) -> Snapshot | None:
        """The snapshot to decide on, if a decision is due."""
        due = self.controller.next_decision_at
        now = self.now()
        if self.stopping or due is None or due > now:
            return None
        self.latest_decision_delay = now - due
        return self.controller.snapshot(now)

    def fire_timer(self) -> bool:
        """Let the controller's timer fire if its time has come."""
        due = self.controller.next_timer_at
        if self.stopping or due is None or due > self.now():
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

    def _decision(self, revision: int, decision: Decision) -> Ask:
        return Ask(lambda at: Facts(DecisionMade(at, revision, decision, partial=True)), lambda: None)

    def next_due(self, deciding: bool) -> float | None:
        """When something has to be done by itself."""
        if self.stopping:
            return None
        times = [self.controller.next_timer_at, None if deciding else self.controller.next_decision_at]
        return min((at for at in times if at is not None), default=None)

    # Snapshots of the state

    def save_if_due(self, elsewhere: Callable[[Callable[[], None]], None]) -> None:
        """Keep a snapshot every so many facts or minutes; writing it takes long and is done `elsewhere`."""
        behind = self._store.revision - self._saved_revision
        old = self._clock() - self._saved_at >= self.settings.snapshot_every_seconds
        if behind >= self.settings.snapshot_every_facts or (behind > 0 and old):
            elsewhere(self._saving())

    def save(self) -> None:
        """Keep a snapshot now."""
        if self._store.revision != self._saved_revision:
            self._saving()()

    def _saving(self) -> Callable[[], None]:
        """What is left to do for a snapshot of this moment; it may be done in any thread."""
        saved = SavedState(self._store.revision, self.controller.state())
        keep_after = self.now() - self.settings.keep_facts_seconds
        self._saved_at, self._saved_revision = self._clock(), saved.revision

        def write() -> None:
            try:
                self._store.save(saved)
                self._store.trim(keep_after)
            except PolluxError as error:
                _log.warning("no snapshot of the state could be kept: %s", error)

        return write

    def close(self) -> None:
        """Keep what is not kept yet."""
        try:
            self._write([], [])
        except PolluxError as error:
            _log.warning("the last measurements could not be kept: %s", error)
        self.save()
