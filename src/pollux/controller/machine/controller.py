"""The state machine between policies and whoever executes: events in, commands out.

No clock, no threads, no I/O: time comes with the events. The simulator and the service drive this same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pollux.controller.codec import snapshots
from pollux.controller.machine import decisions, significance
from pollux.controller.machine.generations import judge
from pollux.controller.machine.reports import limited
from pollux.controller.machine.settings import ControllerSettings
from pollux.controller.messages.commands import Command, Decide, ResizeJob, StartJob, StopJob
from pollux.controller.messages.events import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationOutcome,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobsForgotten,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    TimerFired,
)
from pollux.controller.state.cluster_state import Books, time_up
from pollux.controller.state.lifecycle import ENDED, HOLDING, JobState, step
from pollux.controller.state.records import JobRecord
from pollux.core import (
    NOWHERE,
    BrokenDecision,
    Change,
    Cluster,
    Decision,
    IllegalTransition,
    InvalidInput,
    Placement,
    PolluxError,
    Queue,
    Reason,
    Snapshot,
    check,
    plan,
)
from pollux.goodput.bank import ModelBank
from pollux.goodput.model import GoodputModel

__all__ = ["Controller"]


class Controller:
    """Remembers jobs and nodes; turns events into commands."""

    def __init__(
        self, cluster: Cluster, settings: ControllerSettings | None = None, queues: Iterable[Queue] = ()
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.revision = 0
        self._books = Books(cluster, queues)
        self._memory: object = None
        self.bank = ModelBank()
        self._last_decision = -math.inf
        self._next_decision: float | None = None
        self._last_change = 0
        self._handlers: dict[type[Event], Callable[..., list[Command]]] = {
            JobSubmitted: self._submitted,
            JobRunning: self._running,
            JobReported: self._reported,
            GenerationEnded: self._generation_ended,
            GenerationShrunk: self._generation_shrunk,
            JobFinished: self._finished,
            JobCancelled: self._cancelled,
            JobPaused: self._paused,
            JobResumed: self._resumed,
            JobLimitsChanged: self._limits_changed,
            JobsForgotten: self._forgotten,
            NodeAdded: self._node_added,
            NodeRemoved: self._node_removed,
            QueueChanged: self._queue_changed,
            TimerFired: self._timer_fired,
            DecisionMade: self._decided,
        }

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        """Every job that was submitted and not forgotten, in that order; to be read, not written."""
        return self._books.jobs

    @property
    def active(self) -> Mapping[str, JobRecord]:
        """Jobs that have not ended, in the order of submission."""
        return self._books.active

    @property
    def cluster(self) -> Cluster:
        """The nodes known now."""
        return self._books.cluster

    @property
    def queues(self) -> Mapping[str, Queue]:
        """The queues that were set up; jobs of others have the weight 1 and no quota."""
        return self._books.queues

    @property
    def next_decision_at(self) -> float | None:
        """When the policy is due, if it is."""
        return self._next_decision

    @property
    def last_decision_at(self) -> float | None:
        """When a policy's answer last came in."""
        return None if math.isinf(self._last_decision) else self._last_decision

    @property
    def next_timer_at(self) -> float | None:
        """When a `TimerFired` is due: a pause after a crash, or a time limit, is over."""
        return self._books.next_due

    def begin(self, at: float) -> list[Command]:
        """Start the clock of rounds; under `events` there is nothing to do until something happens."""
        if self.settings.trigger == "rounds":
            return self._schedule(at + self.settings.interval_seconds)
        return []

    def apply(self, event: Event) -> list[Command]:
        """Take a fact in; what must be done now comes out. An event that is refused changes nothing."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InvalidInput(f"event {type(event).__name__} is unknown to this controller; use one of events.py")
        self.revision += 1
        try:
            return handler(event)
        except PolluxError:
            # A refused event is not in the log: a replay must count the same revisions without it.
            self.revision -= 1
            raise

    def draft(self, spec: JobSpec, now: float) -> JobRecord:
        """The record that the job would get if it were submitted now, or the refusal; nothing changes."""
        return self._books.draft(spec, now)

    def snapshot(self, now: float, newcomer: JobRecord | None = None) -> Snapshot:
        """Everything a policy may know at `now`; with a `newcomer`, as if that draft were a job already."""
        records = [record for record in self._books.active.values() if record.is_ready]
        if newcomer is not None and newcomer.is_ready:
            records.append(newcomer)
        jobs, running = [], {}
        for record in records:
            jobs.append(record.view(now, self.bank.prior(record.kind)))
            if record.placement:
                running[record.spec.id] = record.placement
        seed, memory = self.settings.seed, self._memory
        return Snapshot(self.revision, now, self.cluster, tuple(jobs), running, self.queues, seed, memory)

    def narrowed(self, decision: Decision) -> Decision:
        """What the decision changes, for a `DecisionMade` that is partial; see `decisions.narrowed`."""
        return decisions.narrowed(self._books.active, self._books.jobs, decision)

    def remember(self, memory: object) -> None:
        """Keep the policy's memory for the next snapshot; it is no fact, and a restart loses it."""
        self._memory = memory

    def is_news(self, event: JobReported) -> bool:
        """Whether a report has to become a fact; one that is not goes to telemetry only. See `significance.is_news`."""
        return significance.is_news(self._books.record(event.job_id), event, self._books.cluster)

    def state(self) -> dict[str, Any]:
        """Everything but settings and the policy's memory, as plain JSON values."""
        return {
            "revision": self.revision,
            "last_decision": self.last_decision_at,
            "next_decision": self._next_decision,
            "last_change": self._last_change,
            **snapshots.encode_books(self._books),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any], settings: ControllerSettings | None = None) -> Controller:
        """A controller that goes on exactly like the one whose `state()` that was, except for the policy's memory."""
        books = snapshots.decode_books(saved)
        controller = cls(books.cluster, settings)
        controller._books = books
        controller.revision = saved["revision"]
        controller._last_decision = -math.inf if saved["last_decision"] is None else saved["last_decision"]
        controller._next_decision = saved["next_decision"]
        controller._last_change = saved["last_change"]
        return controller

    # Events from users and agents

    def _submitted(self, event: JobSubmitted) -> list[Command]:
        record = self._books.draft(event.spec, event.at)
        self._books.add(record)
        self._books.fail_if_orphaned(record, event.at)
        return self._changed(event.at)

    def _running(self, event: JobRunning) -> list[Command]:
        record = self._books.record(event.job_id)
        stale = event.generation != record.generation
        if not stale and record.state in (JobState.STARTING, JobState.RESIZING):
            record.state = step(event.job_id, record.state, JobState.RUNNING)
            self._books.run(record, event.at)
            if event.pause_seconds is not None and event.resize_kind:
                record.note_pause(event.resize_kind, event.pause_seconds)
        return []

    def _reported(self, event: JobReported) -> list[Command]:
        record = self._books.record(event.job_id)
        if record.state in ENDED:
            return []
        for name in ("remaining", "resize_cost_seconds", "local_batch", "progress"):
            value = getattr(event, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"job '{event.job_id}' reports {name} {value}; give a finite number, 0 or more")
        for name in ("goodput", "remaining", "progress", "local_batch"):
            if getattr(event, name) is not None:
                setattr(record, name, getattr(event, name))
        if event.live is not None and event.live is not record.live:
            record.live = event.live
            if record.costs:
                record.estimate_cost()
        if event.resize_cost_seconds is not None:
            record.note_pause(event.resize_kind, event.resize_cost_seconds)
        if event.local_batch is not None:
            self._learn(record, event)
        record.forget_view()
        return self._changed(event.at) if event.goodput is not None and self._drifted(record) else []

    def _learn(self, record: JobRecord, event: JobReported) -> None:
        kind, model, place = record.kind, record.goodput, record.placement
        if kind and isinstance(model, GoodputModel) and place and record.state is JobState.RUNNING:
            node = self.cluster.by_id.get(place.shares[0][0])
            where = ("" if node is None else node.gpu_type, place.num_nodes, place.num_gpus)
            assert event.local_batch is not None
            self.bank = self.bank.measured(kind, model, where, event.local_batch, record.progress or 0.0, event.at)

    def _drifted(self, record: JobRecord) -> bool:
        return self.settings.trigger == "events" and significance.drifted(
            record, self.cluster, self.settings.model_drift
        )

    def _generation_ended(self, event: GenerationEnded) -> list[Command]:
        record = self._books.jobs.get(event.job_id)
        if record is None or record.state in ENDED or event.generation > record.generation:
            return []
        current = event.generation == record.generation and bool(record.placement)
        if event.outcome == "succeeded":
            # It was through before it noticed that it should stop, or be elsewhere.
            before = NOWHERE if current else record.placement
            self._books.end(record, JobState.SUCCEEDED, event.at, event.detail, Reason("succeeded"))
            return [*_stop(record, before, "finished"), *self._changed(event.at)]
        return self._ended_badly(record, event) if current else []

    def _generation_shrunk(self, event: GenerationShrunk) -> list[Command]:
        """Some replicas are lost and others hold the state: on with those, in place, if that is enough for the job."""
        record = self._books.jobs.get(event.job_id)
        if record is None or record.state not in HOLDING or event.generation != record.generation:
            return []
        before, after = record.placement, event.placement
        if after == before:
            return []
        if any(count > before.on(node) for node, count in after.shares):
            raise InvalidInput(f"job '{event.job_id}' shrank to '{after}', which is not within its '{before}'")
        # Where nobody that ran is gone, nothing is lost.
        outcome: GenerationOutcome = "refused" if event.refused else "stopped" if event.withdrawn else "lost"
        ended = GenerationEnded(event.at, event.job_id, event.generation, outcome, event.detail)
        verdict = judge(record, ended)
        if verdict.state is JobState.FAILED or after.num_gpus < record.spec.limits.min_gpus:
            return self._shrunk_too_far(record, event, ended, stops=verdict.state is not JobState.FAILED)
        numbers = {"gpus_before": float(before.num_gpus), "gpus_after": float(after.num_gpus)}
        if event.refused:
            # It runs on; others need not be asked again at once for what it could not have.
            record.refusals, record.capped_until = verdict.refusals, verdict.eligible_at
            reason = Reason("refused", {**verdict.reason.numbers, **numbers})
        else:
            record.live = True
            if not event.withdrawn:
                record.note_loss(verdict.losses)
            _note_failed_move(record, event.at)
            reason = Reason("replicas-lost", numbers)
        self._books.place(record, after, event.at)
        return [_resize(record, before, after, reason, event.detail, event.at), *self._changed(event.at)]

    def _shrunk_too_far(
        self, record: JobRecord, event: GenerationShrunk, ended: GenerationEnded, stops: bool
    ) -> list[Command]:
        """The replicas that are left are too few, or the job has failed."""
        before = record.placement
        if event.withdrawn:
            _note_failed_move(record, event.at)
        commands = self._ended_badly(record, ended, in_place=False)
        # The replicas that are left wait for a command, unless they know already which replica was refused.
        return [*_stop(record, before, ended.outcome), *commands] if stops and not event.refused else commands

    def _ended_badly(self, record: JobRecord, event: GenerationEnded, in_place: bool = True) -> list[Command]:
        """The replicas that hold the job's GPUs are gone, and it is not through."""
        verdict, before = judge(record, event), record.placement
        record.crashes, record.streak, record.losses = verdict.crashes, verdict.streak, verdict.losses
        moved = event.outcome == "lost" and record.state is JobState.RESIZING and _tried_live(record)
        if event.outcome == "lost":
            record.note_loss(verdict.losses)
            _note_failed_move(record, event.at)
        if event.outcome == "out-of-memory":
            record.local_batch, record.local_batch_max = None, verdict.local_batch_max
            record.goodput = limited(record.goodput, verdict.local_batch_max)
        if verdict.state is JobState.FAILED:
            self._books.end(record, JobState.FAILED, event.at, verdict.detail, verdict.reason)
            # What was lost from sight may still be there.
            commands = _stop(record, before if event.outcome == "lost" else NOWHERE, "failed")
            return [*commands, *self._changed(event.at)]
        record.eligible_at, record.detail = verdict.eligible_at, verdict.detail
        if moved and in_place:
            # A resize without a restart has failed: start from the checkpoint on the same GPUs.
            self._books.renew(record, event.at)
            record.because(event.at, Reason("fell-back", _held(before)))
            return [StartJob(event.job_id, record.generation, record.placement)]
        self._books.requeue(record, event.at, verdict.reason)
        if event.outcome != "refused":
            return self._changed(event.at)
        record.refusals = verdict.refusals
        # An earlier generation of it may still be there.
        return [*_stop(record, before, "refused"), *self._changed(event.at)]

    def _finished(self, event: JobFinished) -> list[Command]:
        record = self._books.record(event.job_id)
        if record.kind and event.outcome == "succeeded" and record.progress is not None:
            self.bank = self.bank.ended(record.kind, record.progress + (record.remaining or 0.0))
        self._books.end(record, JobState(event.outcome), event.at, event.detail, Reason(event.outcome))
        return self._changed(event.at)

    def _cancelled(self, event: JobCancelled) -> list[Command]:
        record = self._books.record(event.job_id)
        before = record.placement
        self._books.end(record, JobState.CANCELLED, event.at, "", Reason("cancelled", _held(before)))
        return [*_stop(record, before, "cancelled"), *self._changed(event.at)]

    def _paused(self, event: JobPaused) -> list[Command]:
        record = self._books.record(event.job_id)
        before = record.placement
        record.state = step(event.job_id, record.state, JobState.PAUSED, record.detail)
        self._books.place(record, NOWHERE, event.at)
        record.because(event.at, Reason("paused", _held(before)))
        return [*_stop(record, before, "paused"), *self._changed(event.at)]

    def _resumed(self, event: JobResumed) -> list[Command]:
        record = self._books.record(event.job_id)
        if record.state is not JobState.PAUSED:
            raise IllegalTransition(f"job '{event.job_id}' is {record.state}; only a paused job can be resumed")
        record.state = step(event.job_id, record.state, JobState.QUEUED)
        waits = Reason("waits-for-job", jobs=record.waiting_for) if record.waiting_for else Reason("resumed")
        record.because(event.at, waits)
        return self._changed(event.at)

    def _limits_changed(self, event: JobLimitsChanged) -> list[Command]:
        record = self._books.record(event.job_id)
        if record.state in ENDED:
            raise IllegalTransition(f"job '{event.job_id}' has {record.state}; its limits cannot change any more")
        record.spec = replace(record.spec, limits=event.limits)
        record.forget_view()
        return self._changed(event.at)

    def _forgotten(self, event: JobsForgotten) -> list[Command]:
        self._books.forget(event.ended_before)
        return []

    # Events from the cluster and the clock

    def _node_added(self, event: NodeAdded) -> list[Command]:
        self._books.add_node(event.node)
        return self._changed(event.at)

    def _node_removed(self, event: NodeRemoved) -> list[Command]:
        commands: list[Command] = []
        for record in self._books.remove_node(event.node_id):
            before = record.placement
            after = Placement(tuple(share for share in before.shares if share[0] != event.node_id))
            if record.moves_live and not record.spec.limits.pinned and after.num_gpus >= record.spec.limits.min_gpus:
                # What it has elsewhere holds its state, and goes on without those here.
                numbers = {"gpus_before": float(before.num_gpus), "gpus_after": float(after.num_gpus)}
                self._books.place(record, after, event.at)
                detail = f"node '{event.node_id}' is leaving, or gone"
                commands.append(_resize(record, before, after, Reason("left-node", numbers), detail, event.at))
                continue
            self._books.requeue(record, event.at, Reason("node-lost", _held(before)))
            commands += _stop(record, before, "node-lost")
        return commands + self._changed(event.at)

    def _queue_changed(self, event: QueueChanged) -> list[Command]:
        self._books.set_queue(event.queue)
        return self._changed(event.at)

    def _timer_fired(self, event: TimerFired) -> list[Command]:
        commands: list[Command] = []
        due = self._books.due(event.at)
        for record in due:
            limit = time_up(record)
            if limit is not None and limit <= event.at:
                commands += self._time_is_up(record, event.at)
                continue
            if record.eligible_at is not None and record.eligible_at <= event.at:
                record.eligible_at = None
            if record.capped_until is not None and record.capped_until <= event.at:
                record.capped_until = None
                record.forget_view()
            self._books.retime(record)
        return [*commands, *self._changed(event.at)] if due else []

    def _time_is_up(self, record: JobRecord, at: float) -> list[Command]:
        before, limit = record.placement, record.spec.time_limit_seconds or 0.0
        numbers = {"limit_seconds": limit, "held_seconds": record.held(at)}
        detail = f"time limit of {limit:g} s reached"
        self._books.end(record, JobState.FAILED, at, detail, Reason("time-limit", numbers))
        return _stop(record, before, "time-limit")

    # Decisions

    def _decided(self, event: DecisionMade) -> list[Command]:
        snapshot = self.snapshot(event.at)
        # Things may have happened while the policy was thinking. Its answer still counts if it fits what is there.
        current = event.revision == self.revision - 1
        decision = decisions.completed(snapshot, event.decision, event.partial, current)
        violations = check(snapshot, decision)
        if violations and current:
            raise BrokenDecision("; ".join(str(violation) for violation in violations))
        self._last_decision = event.at
        self._next_decision = None
        if violations:
            return self._schedule(event.at)
        if not event.partial:
            self._memory = decision.memory
        commands = [self._carry_out(change, decision, event.at) for change in plan(snapshot, decision)]
        for view in snapshot.jobs:
            if not self.jobs[view.id].placement and (reason := decision.reasons.get(view.id)) is not None:
                self.jobs[view.id].because(event.at, reason)
        if self.settings.trigger == "events":
            significance.remember_predictions(self.active.values(), self.cluster)
        if self.settings.trigger == "rounds":
            commands += self._schedule(event.at + self.settings.interval_seconds)
        elif self._last_change > event.revision:
            # The policy did not know of that change yet.
            commands += self._schedule(event.at + self.settings.min_gap_seconds)
        return commands

    def _carry_out(self, change: Change, decision: Decision, at: float) -> Command:
        job_id, record = change.job_id, self.jobs[change.job_id]
        self._books.place(record, change.after, at)
        record.forgive_moves(at)
        record.because(at, decision.reasons.get(job_id) or decisions.fallback_reason(change))
        if change.kind == "stop":
            record.state = step(job_id, record.state, JobState.QUEUED)
            return StopJob(job_id, record.generation, change.before, "preempted")
        if change.kind == "start":
            record.state = step(job_id, record.state, JobState.STARTING)
            return StartJob(job_id, record.generation, change.after)
        record.state = step(job_id, record.state, JobState.RESIZING)
        return ResizeJob(job_id, record.generation, change.before, change.after)

    def _changed(self, at: float) -> list[Command]:
        """Something that can change the answer happened: under `events`, a decision is due."""
        if self.settings.trigger != "events":
            return []
        self._last_change = self.revision
        due = max(at, self._last_decision + self.settings.min_gap_seconds)
        if self._next_decision is not None and self._next_decision <= due:
            return []
        return self._schedule(due)

    def _schedule(self, at: float) -> list[Command]:
        self._next_decision = at
        return [Decide(at)]


def _stop(record: JobRecord, before: Placement, reason: str) -> list[Command]:
    return [StopJob(record.spec.id, record.generation, before, reason)] if before else []


def _resize(record: JobRecord, before: Placement, after: Placement, reason: Reason, detail: str, at: float) -> Command:
    """The command by which a job goes on, without a restart, on the GPUs on which it is placed now."""
    record.state = step(record.spec.id, record.state, JobState.RESIZING)
    record.detail = detail
    record.because(at, reason)
    return ResizeJob(record.spec.id, record.generation, before, after)


def _note_failed_move(record: JobRecord, at: float) -> None:
    if record.state is JobState.RESIZING and _tried_live(record):
        record.note_failed_move(at)


def _tried_live(record: JobRecord) -> bool:
    """Whether the job's last resize was tried without a restart: the job allows it, and no report says it cannot."""
    request = record.spec.request
    return bool(record.live) if request is None else request.is_live and record.live is not False


def _held(placement: Placement) -> dict[str, float]:
    return {"gpus_before": float(placement.num_gpus)}
