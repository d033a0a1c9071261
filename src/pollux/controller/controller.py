"""The state machine between policies and whoever executes: events in, commands out.

No clock, no threads, no I/O: time comes with the events. The simulator and the service drive this same class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from pollux.controller.commands import Command, Decide, ResizeJob, StartJob, StopJob
from pollux.controller.events import (
    DecisionMade,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.controller.lifecycle import ENDED, JobState, step
from pollux.core import (
    NOWHERE,
    BrokenDecision,
    Cluster,
    GoodputFunction,
    IllegalTransition,
    InvalidInput,
    JobView,
    Placement,
    Policy,
    PolluxError,
    Queue,
    Snapshot,
    UnknownName,
    check,
    plan,
)

__all__ = ["Controller", "ControllerSettings", "JobRecord", "require"]


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """When to decide.

    `rounds`: every `interval_seconds`. `events`: when something changed that can change the answer, at least
    `min_gap_seconds` apart; a model counts as changed when its prediction moved by more than `model_drift`.
    """

    trigger: Literal["rounds", "events"] = "rounds"
    interval_seconds: float = 60.0
    min_gap_seconds: float = 2.0
    model_drift: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trigger not in ("rounds", "events"):
            raise UnknownName("trigger", self.trigger, ("rounds", "events"))
        for name in ("interval_seconds", "min_gap_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} is {value}; give a finite number of seconds above 0")


@dataclass(slots=True)
class JobRecord:
    """All the controller knows of one job."""

    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    placement: Placement = NOWHERE
    generation: int = 0
    held_since: float = 0.0
    attained_gpu_seconds: float = 0.0
    num_starts: int = 0
    largest_gpus: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    detail: str = ""
    goodput: GoodputFunction | None = None
    remaining: float | None = None
    resize_cost_seconds: float = 30.0
    decided_goodput: float | None = None
    view: JobView | None = field(default=None, repr=False)

    @property
    def num_restarts(self) -> int:
        """Times it was placed anew after its first start."""
        return max(self.num_starts - 1, 0)

    def attained(self, now: float) -> float:
        """GPU-seconds held up to `now`."""
        return self.attained_gpu_seconds + self.placement.num_gpus * max(now - self.held_since, 0.0)


class Controller:
    """Remembers jobs and nodes; turns events into commands."""

    def __init__(
        self, cluster: Cluster, settings: ControllerSettings | None = None, queues: Iterable[Queue] = ()
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.revision = 0
        self.jobs: dict[str, JobRecord] = {}
        self._cluster = cluster
        self._queues = {queue.name: queue for queue in queues}
        self._active: dict[str, JobRecord] = {}
        self._memory: object = None
        self._last_decision = -math.inf
        self._next_decision: float | None = None
        self._last_change = 0
        self._handlers: dict[type[Event], Callable[..., list[Command]]] = {
            JobSubmitted: self._submitted,
            JobRunning: self._running,
            JobReported: self._reported,
            JobFinished: self._finished,
            JobCancelled: self._cancelled,
            JobPaused: self._paused,
            JobResumed: self._resumed,
            JobLimitsChanged: self._limits_changed,
            NodeAdded: self._node_added,
            NodeRemoved: self._node_removed,
            QueueChanged: self._queue_changed,
            DecisionMade: self._decided,
        }

    @property
    def cluster(self) -> Cluster:
        """The nodes known now."""
        return self._cluster

    @property
    def next_decision_at(self) -> float | None:
        """When the policy is due, if it is."""
        return self._next_decision

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

    def snapshot(self, now: float) -> Snapshot:
        """Everything a policy may know at `now`."""
        jobs, running = [], {}
        for record in self._active.values():
            if record.state is JobState.PAUSED:
                continue
            jobs.append(self._view(record, now))
            if record.placement:
                running[record.spec.id] = record.placement
        return Snapshot(
            self.revision,
            now,
            self._cluster,
            tuple(jobs),
            running,
            self._queues,
            self.settings.seed,
            self._memory,
        )

    def _view(self, record: JobRecord, now: float) -> JobView:
        attained = record.attained(now)
        view = record.view
        if view is None:
            spec = record.spec
            view = JobView(
                id=spec.id, submitted_at=record.submitted_at, limits=spec.limits,
                requested_gpus=spec.requested_gpus, weight=spec.weight, queue=spec.queue,
                attained_gpu_seconds=attained, num_restarts=record.num_restarts,
                largest_gpus=record.largest_gpus, resize_cost_seconds=record.resize_cost_seconds,
                goodput=record.goodput, remaining=record.remaining, oracle=spec.oracle,
            )  # fmt: skip
        elif view.attained_gpu_seconds != attained:
            view = replace(view, attained_gpu_seconds=attained)
        record.view = view
        return view

    # Events from users and agents

    def _submitted(self, event: JobSubmitted) -> list[Command]:
        spec = event.spec
        if spec.id in self.jobs:
            raise InvalidInput(f"job '{spec.id}' is known already; give the new one another name")
        record = JobRecord(spec, event.at, resize_cost_seconds=spec.resize_cost_seconds)
        self._view(record, event.at)  # refuses what no snapshot could hold, while its user is still there
        self.jobs[spec.id] = self._active[spec.id] = record
        return self._changed(event.at)

    def _running(self, event: JobRunning) -> list[Command]:
        record = self._record(event.job_id)
        stale = event.generation != record.generation
        if not stale and record.state in (JobState.STARTING, JobState.RESIZING):
            record.state = step(event.job_id, record.state, JobState.RUNNING)
        return []

    def _reported(self, event: JobReported) -> list[Command]:
        record = self._record(event.job_id)
        if record.state in ENDED:
            return []
        for name in ("remaining", "resize_cost_seconds"):
            value = getattr(event, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"job '{event.job_id}' reports {name} {value}; give a finite number, 0 or more")
        if event.goodput is not None:
            record.goodput = event.goodput
        if event.remaining is not None:
            record.remaining = event.remaining
        if event.resize_cost_seconds is not None:
            record.resize_cost_seconds = event.resize_cost_seconds
        record.view = None
        return self._changed(event.at) if event.goodput is not None and self._drifted(record) else []

    def _drifted(self, record: JobRecord) -> bool:
        if self.settings.trigger != "events" or record.goodput is None or not record.placement:
            return False
        if record.decided_goodput is None:
            return True
        now = self._predicted(record, record.goodput)
        return abs(now - record.decided_goodput) > self.settings.model_drift * record.decided_goodput

    def _finished(self, event: JobFinished) -> list[Command]:
        record = self._record(event.job_id)
        self._end(record, JobState(event.outcome), event.at)
        record.detail = event.detail
        return self._changed(event.at)

    def _cancelled(self, event: JobCancelled) -> list[Command]:
        record = self._record(event.job_id)
        before = record.placement
        self._end(record, JobState.CANCELLED, event.at)
        return [*self._stop(record, before, "cancelled"), *self._changed(event.at)]

    def _paused(self, event: JobPaused) -> list[Command]:
        record = self._record(event.job_id)
        before = record.placement
        record.state = step(event.job_id, record.state, JobState.PAUSED)
        self._place(record, NOWHERE, event.at)
        return [*self._stop(record, before, "paused"), *self._changed(event.at)]

    def _resumed(self, event: JobResumed) -> list[Command]:
        record = self._record(event.job_id)
        if record.state is not JobState.PAUSED:
            raise IllegalTransition(f"job '{event.job_id}' is {record.state}; only a paused job can be resumed")
        record.state = step(event.job_id, record.state, JobState.QUEUED)
        return self._changed(event.at)

    def _limits_changed(self, event: JobLimitsChanged) -> list[Command]:
        record = self._record(event.job_id)
        if record.state in ENDED:
            raise InvalidInput(f"job '{event.job_id}' has {record.state}; its limits cannot change any more")
        record.spec = replace(record.spec, limits=event.limits)
        record.view = None
        return self._changed(event.at)

    # Events from the cluster

    def _node_added(self, event: NodeAdded) -> list[Command]:
        nodes = [event.node if node.id == event.node.id else node for node in self._cluster.nodes]
        if event.node.id not in self._cluster.by_id:
            nodes.append(event.node)
        self._cluster = Cluster(tuple(nodes))
        return self._changed(event.at)

    def _node_removed(self, event: NodeRemoved) -> list[Command]:
        self._cluster = Cluster(tuple(node for node in self._cluster.nodes if node.id != event.node_id))
        commands: list[Command] = []
        for record in self._active.values():
            if record.placement.on(event.node_id):
                before = record.placement
                self._place(record, NOWHERE, event.at)
                record.state = step(record.spec.id, record.state, JobState.QUEUED)
                commands += self._stop(record, before, "node-lost")
        return commands + self._changed(event.at)

    def _queue_changed(self, event: QueueChanged) -> list[Command]:
        self._queues = {**self._queues, event.queue.name: event.queue}
        return self._changed(event.at)

    # Decisions

    def _decided(self, event: DecisionMade) -> list[Command]:
        snapshot = self.snapshot(event.at)
        decision, current = event.decision, event.revision == self.revision - 1
        if not current:
            # Things happened while the policy was thinking. Its answer still counts if it fits what is there.
            known = {job.id for job in snapshot.jobs}
            allocation = {job_id: placement for job_id, placement in decision.allocation.items() if job_id in known}
            decision = replace(decision, allocation=allocation)
        violations = check(snapshot, decision)
        if violations and current:
            raise BrokenDecision("; ".join(str(violation) for violation in violations))
        self._last_decision = event.at
        self._next_decision = None
        if violations:
            return self._schedule(event.at)
        self._memory = decision.memory
        commands: list[Command] = []
        for change in plan(snapshot, decision):
            record = self.jobs[change.job_id]
            self._place(record, change.after, event.at)
            if change.kind == "stop":
                record.state = step(change.job_id, record.state, JobState.QUEUED)
                commands += self._stop(record, change.before, "preempted")
            elif change.kind == "start":
                record.state = step(change.job_id, record.state, JobState.STARTING)
                commands.append(StartJob(change.job_id, record.generation, change.after))
            else:
                record.state = step(change.job_id, record.state, JobState.RESIZING)
                commands.append(ResizeJob(change.job_id, record.generation, change.before, change.after))
        self._remember_predictions()
        if self.settings.trigger == "rounds":
            commands += self._schedule(event.at + self.settings.interval_seconds)
        elif self._last_change > event.revision:
            # The policy did not know of that change yet.
            commands += self._schedule(event.at + self.settings.min_gap_seconds)
        return commands

    def _remember_predictions(self) -> None:
        if self.settings.trigger != "events":
            return
        for record in self._active.values():
            record.decided_goodput = None
            if record.goodput is not None and record.placement:
                record.decided_goodput = self._predicted(record, record.goodput)

    def _predicted(self, record: JobRecord, model: GoodputFunction) -> float:
        placement = record.placement
        gpu_type = self._cluster.by_id[placement.shares[0][0]].gpu_type
        return model.goodput(placement.num_nodes, placement.num_gpus, gpu_type)

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

    # Bookkeeping

    def _record(self, job_id: str) -> JobRecord:
        record = self.jobs.get(job_id)
        if record is None:
            raise UnknownName("job", job_id, self.jobs)
        return record

    def _place(self, record: JobRecord, placement: Placement, at: float) -> None:
        """Hold `placement` from `at` on; a new generation unless nothing changes."""
        if placement == record.placement:
            return
        record.attained_gpu_seconds = record.attained(at)
        record.held_since = at
        record.placement = placement
        record.generation += 1
        if placement:
            record.num_starts += 1
            record.largest_gpus = max(record.largest_gpus, placement.num_gpus)
            if record.started_at is None:
                record.started_at = at
        record.view = None

    def _end(self, record: JobRecord, state: JobState, at: float) -> None:
        after = step(record.spec.id, record.state, state)
        self._place(record, NOWHERE, at)
        record.state = after
        record.ended_at = at
        del self._active[record.spec.id]

    def _stop(self, record: JobRecord, before: Placement, reason: str) -> list[Command]:
        return [StopJob(record.spec.id, record.generation, before, reason)] if before else []


def require(policy: Policy, offered: Iterable[str]) -> None:
    """Refuse, at set-up, a policy that reads what the driver cannot fill."""
    missing = sorted(policy.needs - set(offered))
    if missing:
        raise InvalidInput(
            f"policy '{policy.name}' needs {', '.join(missing)}, which is not known here; "
            "use it in the simulator, or choose another policy"
        )
