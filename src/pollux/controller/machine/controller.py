"""The state machine between policies and drivers: events in, commands out.

No clock, no threads, no I/O: time comes with the events. The simulator and the service drive this same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pollux.controller.codec import snapshots
from pollux.controller.codec.bank import WrittenKinds, decode_bank, encode_bank
from pollux.controller.machine import (
    decisions,
    generation_ends,
    node_changes,
    node_health,
    placing,
    returns,
    significance,
    timers,
)
from pollux.controller.machine.decision_times import DecisionTimes
from pollux.controller.machine.reports import check_numbers, completed_work, learned, note_report
from pollux.controller.machine.settings import ControllerSettings
from pollux.controller.messages.commands import Command
from pollux.controller.messages.events import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobRan,
    JobReported,
    JobResumed,
    JobRunning,
    JobsForgotten,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    NodeSetAside,
    NodeTakenBack,
    QueueChanged,
    TimerFired,
    TimeSkipped,
)
from pollux.controller.state.cluster_state import ClusterState
from pollux.controller.state.lifecycle import ENDED, JobState, step
from pollux.controller.state.records import JobRecord
from pollux.core import (
    NOWHERE,
    BrokenDecision,
    Cluster,
    Decision,
    IllegalTransition,
    InvalidInput,
    PolluxError,
    Queue,
    Reason,
    Snapshot,
    check,
    plan,
)
from pollux.goodput.bank import ModelBank

__all__ = ["Controller"]


class Controller:
    """Keeps the state of jobs and nodes; turns events into commands."""

    def __init__(
        self, cluster: Cluster, settings: ControllerSettings | None = None, queues: Iterable[Queue] = ()
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.revision = 0
        self._cluster_state = ClusterState(cluster, queues)
        self._memory: object = None
        self.bank = ModelBank()
        self._written_kinds: WrittenKinds = {}
        self._times = DecisionTimes(self.settings)
        self._handlers: dict[type[Event], Callable[..., list[Command]]] = {
            JobSubmitted: self._submitted,
            JobRunning: self._running,
            JobRan: lambda event: _note_run(self._cluster_state, event),
            JobReported: self._reported,
            GenerationEnded: self._generation_ended,
            GenerationShrunk: self._generation_shrunk,
            JobFinished: self._finished,
            JobCancelled: self._cancelled,
            JobPaused: self._paused,
            JobResumed: self._resumed,
            JobLimitsChanged: self._limits_changed,
            JobsForgotten: self._forgotten,
            NodeAdded: self._nodes_changed,
            NodeRemoved: self._nodes_changed,
            NodeSetAside: self._nodes_changed,
            NodeTakenBack: self._nodes_changed,
            QueueChanged: self._queue_changed,
            TimerFired: self._timer_fired,
            TimeSkipped: self._time_skipped,
            DecisionMade: self._decided,
        }

    @property
    def jobs(self) -> Mapping[str, JobRecord]:
        """Every job that was submitted and not forgotten, in order of submission. Do not change it."""
        return self._cluster_state.jobs

    @property
    def active(self) -> Mapping[str, JobRecord]:
        """Jobs that have not ended, in the order of submission."""
        return self._cluster_state.active

    @property
    def cluster(self) -> Cluster:
        """The nodes known now."""
        return self._cluster_state.cluster

    @property
    def queues(self) -> Mapping[str, Queue]:
        """The queues that were set up; other queues have the weight 1 and no quota."""
        return self._cluster_state.queues

    @property
    def set_aside(self) -> Mapping[str, str]:
        """Nodes on which policies place nothing new, and why. Do not change it."""
        return self._cluster_state.trust.set_aside

    def suspects(self) -> list[tuple[str, str]]:
        """Nodes on which jobs fail again and again, and why a `NodeSetAside` should set them aside."""
        usable = [node.id for node in self.cluster.nodes if node.schedulable and node.num_gpus]
        return list(self._cluster_state.trust.suspects(usable))

    @property
    def next_decision_at(self) -> float | None:
        """When the next decision is due; None if none is."""
        return self._times.next_at

    @property
    def next_timer_at(self) -> float | None:
        """When a `TimerFired` is due: a pause after a crash, or a time limit, is over."""
        return self._cluster_state.next_due

    def start(self, at: float) -> list[Command]:
        """Start the clock of rounds; under `events` there is nothing to do until something happens."""
        return self._times.start(at)

    def apply(self, event: Event) -> list[Command]:
        """Apply an event and return the commands that follow from it. An event that is refused changes nothing."""
        handler = self._handlers.get(type(event))
        if handler is None:
            raise InvalidInput(
                f"event {type(event).__name__} is not known to the controller; see pollux.controller.messages.events"
            )
        self.revision += 1
        try:
            return handler(event)
        except PolluxError:
            # A refused event is not in the log: a replay must count the same revisions without it.
            self.revision -= 1
            raise

    def draft(self, spec: JobSpec, now: float) -> JobRecord:
        """The record that the job would get if it were submitted now, or the refusal; nothing changes."""
        return self._cluster_state.draft(spec, now)

    def snapshot(self, now: float, newcomer: JobRecord | None = None) -> Snapshot:
        """Everything a policy may know at `now`; a `newcomer` is included as if it had been submitted."""
        snapshot = returns.within_free_room(self._whole_snapshot(now, newcomer), self._cluster_state.active.values())
        return node_health.without_set_aside(snapshot, self.set_aside)

    def _whole_snapshot(self, now: float, newcomer: JobRecord | None = None) -> Snapshot:
        """The snapshot without the limits that only policies see: decisions are checked against this one."""
        records = [record for record in self._cluster_state.active.values() if record.is_ready]
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
        """Only the changes of a decision, for a partial `DecisionMade`; see `decisions.narrowed`."""
        return decisions.narrowed(self._cluster_state.active, self._cluster_state.jobs, decision)

    def remember(self, memory: object) -> None:
        """Keep the policy's memory for the next snapshot; it is not saved, and a restart loses it."""
        self._memory = memory

    def is_news(self, event: JobReported) -> bool:
        """Whether a report must become a fact; any other goes to telemetry only. See `significance.is_news`."""
        return significance.is_news(self._cluster_state.record(event.job_id), event, self._cluster_state.cluster)

    def state(self) -> dict[str, Any]:
        """Everything but settings and the policy's memory, as plain JSON values."""
        return self.state_later()()

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """A function that gives the `state()` of this moment; call it later, in one thread at a time: it is slow."""
        revision, times, bank = self.revision, self._times.state(), self.bank
        jobs = snapshots.encode_state(self._cluster_state)
        return lambda: {"revision": revision, **times, **jobs(), "bank": encode_bank(bank, self._written_kinds)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any], settings: ControllerSettings | None = None) -> Controller:
        """A controller with the state that `state()` returned; the policy's memory is not part of it."""
        cluster_state = snapshots.decode_state(saved)
        controller = cls(cluster_state.cluster, settings)
        controller._cluster_state = cluster_state
        controller.revision = saved["revision"]
        # Older states have no model bank.
        controller.bank = snapshots.decoded(decode_bank, saved.get("bank", {}))
        controller._times.restore(saved)
        return controller

    # Events from users and agents

    def _submitted(self, event: JobSubmitted) -> list[Command]:
        record = self._cluster_state.draft(event.spec, event.at)
        self._cluster_state.add(record)
        self._cluster_state.fail_if_orphaned(record, event.at)
        return self._note_change(event.at)

    def _running(self, event: JobRunning) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        stale = event.generation != record.generation
        if not stale and record.state in (JobState.STARTING, JobState.RESIZING):
            record.state = step(event.job_id, record.state, JobState.RUNNING)
            self._cluster_state.run(record, event.at)
            if event.pause_seconds is not None and event.resize_kind:
                record.note_pause(event.resize_kind, event.pause_seconds)
        return []

    def _reported(self, event: JobReported) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        if record.state in ENDED:
            return []
        check_numbers(event)
        note_report(record, event)
        self.bank = learned(self.bank, record, self.cluster, event)
        if event.goodput is None or self.settings.trigger != "events":
            return []
        drifted = significance.drifted(record, self.cluster, self.settings.model_drift)
        return self._note_change(event.at) if drifted else []

    def _generation_ended(self, event: GenerationEnded) -> list[Command]:
        record = self._cluster_state.jobs.get(event.job_id)
        if record is None or record.state in ENDED or event.generation > record.generation:
            return []
        current = event.generation == record.generation and bool(record.placement)
        node_health.note_end(self._cluster_state.trust, record, event)
        if event.outcome == "succeeded":
            # The job finished before the command to stop or resize reached it.
            before = NOWHERE if current else record.placement
            self.bank = completed_work(self.bank, record)
            self._cluster_state.end(record, JobState.SUCCEEDED, event.at, event.detail, Reason("succeeded"))
            return [*placing.stop(record, before, "finished"), *self._note_change(event.at)]
        if not current:
            return []
        commands = generation_ends.failed(self._cluster_state, record, event)
        # A job that starts again on its own GPUs needs no decision.
        return commands if record.placement else [*commands, *self._note_change(event.at)]

    def _generation_shrunk(self, event: GenerationShrunk) -> list[Command]:
        commands = generation_ends.shrunk(self._cluster_state, event)
        return [] if commands is None else [*commands, *self._note_change(event.at)]

    def _finished(self, event: JobFinished) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        if event.outcome == "succeeded":
            self.bank = completed_work(self.bank, record)
        self._cluster_state.end(record, JobState(event.outcome), event.at, event.detail, Reason(event.outcome))
        return self._note_change(event.at)

    def _cancelled(self, event: JobCancelled) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        before = record.placement
        self._cluster_state.end(
            record, JobState.CANCELLED, event.at, "", Reason("cancelled", placing.gpus_before(before))
        )
        return [*placing.stop(record, before, "cancelled"), *self._note_change(event.at)]

    def _paused(self, event: JobPaused) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        before = record.placement
        record.state = step(event.job_id, record.state, JobState.PAUSED, record.detail)
        self._cluster_state.place(record, NOWHERE, event.at)
        record.set_reason(event.at, Reason("paused", placing.gpus_before(before)))
        return [*placing.stop(record, before, "paused"), *self._note_change(event.at)]

    def _resumed(self, event: JobResumed) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        if record.state is not JobState.PAUSED:
            raise IllegalTransition(f"job '{event.job_id}' is {record.state}; only a paused job can be resumed")
        record.state = step(event.job_id, record.state, JobState.QUEUED)
        waits = Reason("waits-for-job", jobs=record.waiting_for) if record.waiting_for else Reason("resumed")
        record.set_reason(event.at, waits)
        return self._note_change(event.at)

    def _limits_changed(self, event: JobLimitsChanged) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        if record.state in ENDED:
            raise IllegalTransition(f"job '{event.job_id}' has {record.state}; its limits cannot change any more")
        record.spec = replace(record.spec, limits=event.limits)
        record.forget_view()
        return self._note_change(event.at)

    def _forgotten(self, event: JobsForgotten) -> list[Command]:
        self._cluster_state.forget(event.ended_before)
        return []

    # Events from the cluster and the clock

    def _nodes_changed(self, event: node_changes.NodeEvent) -> list[Command]:
        return [*node_changes.apply(self._cluster_state, event), *self._note_change(event.at)]

    def _queue_changed(self, event: QueueChanged) -> list[Command]:
        self._cluster_state.set_queue(event.queue)
        return self._note_change(event.at)

    def _time_skipped(self, event: TimeSkipped) -> list[Command]:
        """Leave the seconds out of all durations. Policies lose their memory, since it may hold times."""
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise InvalidInput(f"the clock skipped {event.seconds} s; give a finite number, 0 or more")
        self._cluster_state.skip(event.seconds, event.away)
        if event.away:
            return []
        self._times.skip(event.seconds)
        self._memory = None
        return []

    def _timer_fired(self, event: TimerFired) -> list[Command]:
        commands = timers.fired(self._cluster_state, event.at)
        return [] if commands is None else [*commands, *self._note_change(event.at)]

    # Decisions

    def _decided(self, event: DecisionMade) -> list[Command]:
        snapshot = self._whole_snapshot(event.at)
        # Events may have come while the policy was deciding. Its answer counts if it fits the cluster as it is now.
        current = event.revision == self.revision - 1
        decision = decisions.completed(snapshot, event.decision, event.partial, current)
        violations = check(snapshot, decision)
        if violations and current:
            raise BrokenDecision("; ".join(str(violation) for violation in violations))
        self._times.note_decision(event.at)
        if violations:
            return self._times.schedule(event.at)
        if not event.partial:
            self._memory = decision.memory
        changes = plan(snapshot, decision)
        commands = [placing.carry_out(self._cluster_state, change, decision, event.at) for change in changes]
        for view in snapshot.jobs:
            if not self.jobs[view.id].placement and (reason := decision.reasons.get(view.id)) is not None:
                self.jobs[view.id].set_reason(event.at, reason)
        if self.settings.trigger == "events":
            significance.remember_predictions(self.active.values(), self.cluster)
        return commands + self._times.schedule_next(event.at, event.revision)

    def _note_change(self, at: float) -> list[Command]:
        """Note an event that can change the decision: under `events`, a decision is due."""
        return self._times.note_change(at, self.revision)


def _note_run(cluster_state: ClusterState, event: JobRan) -> list[Command]:
    record = cluster_state.record(event.job_id)
    if event.generation == record.generation:
        record.note_run(event.at, event.seconds)
        cluster_state.note_due_time(record)
    return []
