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
from pollux.controller.machine import decisions, node_health, returns, significance
from pollux.controller.machine.decision_times import DecisionTimes
from pollux.controller.machine.reports import check_numbers, completed_work, learned, limited
from pollux.controller.machine.retries import RetryDecision, decide_retry
from pollux.controller.machine.settings import ControllerSettings
from pollux.controller.messages.commands import Command, ResizeJob, StartJob, StopJob
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
from pollux.controller.state.cluster_state import ClusterState, time_up
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
    UnknownName,
    check,
    plan,
)
from pollux.core.errors import Conflict
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
            NodeAdded: self._node_added,
            NodeRemoved: self._node_removed,
            NodeSetAside: self._node_set_aside,
            NodeTakenBack: self._node_taken_back,
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
        """Nodes on which jobs fail again and again, and why they are to be set aside by a `NodeSetAside`."""
        usable = [node.id for node in self.cluster.nodes if node.schedulable and node.num_gpus]
        return list(self._cluster_state.trust.suspects(usable))

    @property
    def next_decision_at(self) -> float | None:
        """When the next decision is due; None if none is."""
        return self._times.next_at

    @property
    def last_decision_at(self) -> float | None:
        """When the last decision was made; None before the first."""
        return self._times.last_at

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
        """The snapshot with all that jobs may have: what holds for policies only is no reason to refuse a decision."""
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
        """Whether a report has to become a fact; one that is not goes to telemetry only. See `significance.is_news`."""
        return significance.is_news(self._cluster_state.record(event.job_id), event, self._cluster_state.cluster)

    def state(self) -> dict[str, Any]:
        """Everything but settings and the policy's memory, as plain JSON values."""
        return self.state_later()()

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What gives the `state()` of this moment, later and in another thread, one at a time: it takes a while."""
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
        for name in ("goodput", "remaining", "progress", "local_batch", "utilization", "memory_bytes"):
            if getattr(event, name) is not None:
                setattr(record, name, getattr(event, name))
        if event.loss is not None:
            record.note_loss_value(event.loss)
        if event.live is not None and event.live is not record.live:
            record.live = event.live
            if record.costs:
                record.estimate_cost()
        if event.resize_cost_seconds is not None:
            record.note_pause(event.resize_kind, event.resize_cost_seconds)
        self.bank = learned(self.bank, record, self.cluster, event)
        record.forget_view()
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
            return [*_stop(record, before, "finished"), *self._note_change(event.at)]
        return self._ended_badly(record, event) if current else []

    def _generation_shrunk(self, event: GenerationShrunk) -> list[Command]:
        """Some replicas are lost. The job goes on with the others, which have its state, if they are enough."""
        record = self._cluster_state.jobs.get(event.job_id)
        if record is None or record.state not in HOLDING or event.generation != record.generation:
            return []
        before, after = record.placement, event.placement
        if after == before:
            return []
        if any(count > before.on(node) for node, count in after.shares):
            raise InvalidInput(f"job '{event.job_id}' shrank to '{after}', which is not a part of its '{before}'")
        ended = GenerationEnded(event.at, event.job_id, event.generation, _outcome_of(event), event.detail)
        retry = decide_retry(record, ended)
        if retry.state is JobState.FAILED or after.num_gpus < record.spec.limits.min_gpus:
            return self._shrunk_too_far(record, event, ended, stops=retry.state is not JobState.FAILED)
        reason = _note_shrunk(record, event, retry)
        self._cluster_state.place(record, after, event.at)
        return [_resize(record, before, after, reason, event.detail, event.at), *self._note_change(event.at)]

    def _shrunk_too_far(
        self, record: JobRecord, event: GenerationShrunk, ended: GenerationEnded, stops: bool
    ) -> list[Command]:
        """The replicas that are left are too few, or the job has failed."""
        before = record.placement
        if event.withdrawn:
            record.note_failed_move(event.at)
        commands = self._ended_badly(record, ended, in_place=False)
        # The other replicas wait for a command, except after a refusal, which they know of.
        return [*_stop(record, before, ended.outcome), *commands] if stops and not event.refused else commands

    def _ended_badly(self, record: JobRecord, event: GenerationEnded, in_place: bool = True) -> list[Command]:
        """All replicas of the job have ended, and the job is not finished."""
        retry, before = decide_retry(record, event), record.placement
        record.crashes, record.streak, record.losses = retry.crashes, retry.streak, retry.losses
        moved = event.outcome == "lost" and record.resizes_live
        if event.outcome == "lost":
            record.note_loss(retry.losses)
            record.note_failed_move(event.at)
        if event.outcome == "out-of-memory":
            record.local_batch, record.local_batch_max = None, retry.local_batch_max
            record.goodput = limited(record.goodput, retry.local_batch_max)
        if retry.state is JobState.FAILED:
            self._cluster_state.end(record, JobState.FAILED, event.at, retry.detail, retry.reason)
            # Lost replicas may still run where the backend cannot reach them.
            commands = _stop(record, before if event.outcome == "lost" else NOWHERE, "failed")
            return [*commands, *self._note_change(event.at)]
        record.eligible_at, record.detail = retry.eligible_at, retry.detail
        record.quiet_until = returns.quiet_until(record, event.at, retry)
        if moved and in_place:
            # A resize without a restart has failed: start from the checkpoint on the same GPUs.
            self._cluster_state.renew(record, event.at)
            record.set_reason(event.at, Reason("fell-back", _gpus_before(before)))
            return [StartJob(event.job_id, record.generation, record.placement)]
        self._cluster_state.requeue(record, event.at, retry.reason)
        if event.outcome != "refused":
            return self._note_change(event.at)
        record.refusals = retry.refusals
        # Replicas of an earlier generation may still run.
        return [*_stop(record, before, "refused"), *self._note_change(event.at)]

    def _finished(self, event: JobFinished) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        if event.outcome == "succeeded":
            self.bank = completed_work(self.bank, record)
        self._cluster_state.end(record, JobState(event.outcome), event.at, event.detail, Reason(event.outcome))
        return self._note_change(event.at)

    def _cancelled(self, event: JobCancelled) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        before = record.placement
        self._cluster_state.end(record, JobState.CANCELLED, event.at, "", Reason("cancelled", _gpus_before(before)))
        return [*_stop(record, before, "cancelled"), *self._note_change(event.at)]

    def _paused(self, event: JobPaused) -> list[Command]:
        record = self._cluster_state.record(event.job_id)
        before = record.placement
        record.state = step(event.job_id, record.state, JobState.PAUSED, record.detail)
        self._cluster_state.place(record, NOWHERE, event.at)
        record.set_reason(event.at, Reason("paused", _gpus_before(before)))
        return [*_stop(record, before, "paused"), *self._note_change(event.at)]

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

    def _node_added(self, event: NodeAdded) -> list[Command]:
        self._cluster_state.add_node(event.node)
        return self._note_change(event.at)

    def _node_removed(self, event: NodeRemoved) -> list[Command]:
        commands: list[Command] = []
        for record in self._cluster_state.remove_node(event.node_id):
            before = record.placement
            after = Placement(tuple(share for share in before.shares if share[0] != event.node_id))
            if record.moves_live and not record.spec.limits.pinned and after.num_gpus >= record.spec.limits.min_gpus:
                # Its replicas on other nodes hold its state, and go on without those on this node.
                numbers = {"gpus_before": float(before.num_gpus), "gpus_after": float(after.num_gpus)}
                self._cluster_state.place(record, after, event.at)
                detail = f"node '{event.node_id}' is leaving, or gone"
                commands.append(_resize(record, before, after, Reason("left-node", numbers), detail, event.at))
                continue
            self._cluster_state.requeue(record, event.at, Reason("node-lost", _gpus_before(before)))
            commands += _stop(record, before, "node-lost")
        return commands + self._note_change(event.at)

    def _node_set_aside(self, event: NodeSetAside) -> list[Command]:
        self._known_node(event.node_id)
        self._cluster_state.trust.put_aside(event.node_id, event.why)
        return self._note_change(event.at)

    def _node_taken_back(self, event: NodeTakenBack) -> list[Command]:
        if event.node_id not in self.set_aside:
            self._known_node(event.node_id)
            raise Conflict(f"node '{event.node_id}' is in use; only a node that was set aside can be taken back")
        self._cluster_state.trust.take_back(event.node_id)
        return self._note_change(event.at)

    def _known_node(self, node_id: str) -> None:
        if node_id not in self.cluster.by_id:
            raise UnknownName("node", node_id, self.cluster.by_id)

    def _queue_changed(self, event: QueueChanged) -> list[Command]:
        self._cluster_state.set_queue(event.queue)
        return self._note_change(event.at)

    def _time_skipped(self, event: TimeSkipped) -> list[Command]:
        """Leave the seconds out of everything that lasts. Policies begin anew: their memory may hold times."""
        if not (math.isfinite(event.seconds) and event.seconds >= 0):
            raise InvalidInput(f"the clock skipped {event.seconds} s; give a finite number, 0 or more")
        self._cluster_state.skip(event.seconds, event.away)
        if event.away:
            return []
        self._times.skip(event.seconds)
        self._memory = None
        return []

    def _timer_fired(self, event: TimerFired) -> list[Command]:
        commands: list[Command] = []
        due = self._cluster_state.due(event.at)
        for record in due:
            limit = time_up(record)
            if limit is not None and limit <= event.at:
                commands += self._time_is_up(record, event.at)
                continue
            self._end_pauses(record, event.at)
        return [*commands, *self._note_change(event.at)] if due else []

    def _end_pauses(self, record: JobRecord, at: float) -> None:
        """End the restrictions of a job after failures whose time is over."""
        if record.quiet_until is not None and record.quiet_until <= at:
            record.quiet_until = None
        if record.capped_until is not None and record.capped_until <= at:
            record.capped_until = None
            record.forget_view()
        if record.eligible_at is not None and record.eligible_at <= at:
            record.eligible_at = None
            if (reason := returns.waits_reason(record, at)) is not None:
                record.set_reason(at, reason)
        self._cluster_state.note_due_time(record)

    def _time_is_up(self, record: JobRecord, at: float) -> list[Command]:
        before, limit = record.placement, record.spec.time_limit_seconds or 0.0
        numbers = {"limit_seconds": limit, "held_seconds": record.running_seconds(at)}
        detail = f"time limit of {limit:g} s reached"
        self._cluster_state.end(record, JobState.FAILED, at, detail, Reason("time-limit", numbers))
        return _stop(record, before, "time-limit")

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
        commands = [self._carry_out(change, decision, event.at) for change in plan(snapshot, decision)]
        for view in snapshot.jobs:
            if not self.jobs[view.id].placement and (reason := decision.reasons.get(view.id)) is not None:
                self.jobs[view.id].set_reason(event.at, reason)
        if self.settings.trigger == "events":
            significance.remember_predictions(self.active.values(), self.cluster)
        return commands + self._times.schedule_next(event.at, event.revision)

    def _carry_out(self, change: Change, decision: Decision, at: float) -> Command:
        job_id, record = change.job_id, self.jobs[change.job_id]
        self._cluster_state.place(record, change.after, at)
        record.forgive_moves(at)
        record.set_reason(at, decision.reasons.get(job_id) or decisions.fallback_reason(change))
        if change.kind == "stop":
            record.state = step(job_id, record.state, JobState.QUEUED)
            return StopJob(job_id, record.generation, change.before, "preempted")
        if change.kind == "start":
            record.state = step(job_id, record.state, JobState.STARTING)
            return StartJob(job_id, record.generation, change.after)
        record.state = step(job_id, record.state, JobState.RESIZING)
        return ResizeJob(job_id, record.generation, change.before, change.after)

    def _note_change(self, at: float) -> list[Command]:
        """Note an event that can change the decision: under `events`, a decision is due."""
        return self._times.note_change(at, self.revision)


def _note_run(cluster_state: ClusterState, event: JobRan) -> list[Command]:
    record = cluster_state.record(event.job_id)
    if event.generation == record.generation:
        record.note_run(event.at, event.seconds)
        cluster_state.note_due_time(record)
    return []


def _stop(record: JobRecord, before: Placement, reason: str) -> list[Command]:
    return [StopJob(record.spec.id, record.generation, before, reason)] if before else []


def _resize(record: JobRecord, before: Placement, after: Placement, reason: Reason, detail: str, at: float) -> Command:
    """The command to resize a job live to its present placement."""
    record.state = step(record.spec.id, record.state, JobState.RESIZING)
    record.detail = detail
    record.set_reason(at, reason)
    return ResizeJob(record.spec.id, record.generation, before, after)


def _gpus_before(placement: Placement) -> dict[str, float]:
    return {"gpus_before": float(placement.num_gpus)}


def _outcome_of(event: GenerationShrunk) -> GenerationOutcome:
    """How the event counts: as a loss only if replicas that ran are gone."""
    if event.refused:
        return "refused"
    return "stopped" if event.withdrawn else "lost"


def _note_shrunk(record: JobRecord, event: GenerationShrunk, retry: RetryDecision) -> Reason:
    """Note in the record that the job goes on with fewer replicas; returns the reason for its placement."""
    numbers = {"gpus_before": float(record.placement.num_gpus), "gpus_after": float(event.placement.num_gpus)}
    if event.refused:
        # It goes on; for a while it does not ask for these GPUs again.
        record.refusals, record.capped_until = retry.refusals, retry.eligible_at
        return Reason("refused", {**retry.reason.numbers, **numbers})
    record.live = True
    if not event.withdrawn:
        record.note_loss(retry.losses)
    record.note_failed_move(event.at)
    return Reason("replicas-lost", numbers)
