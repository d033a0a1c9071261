"""The state of jobs, nodes and queues, changes that keep it consistent, and the times at which something is due.

`controller` decides which event makes which change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from pollux.controller.messages.events import JobSpec
from pollux.controller.state.lifecycle import ENDED, JobState, step
from pollux.controller.state.node_trust import NodeTrust
from pollux.controller.state.records import JobRecord
from pollux.core import NOWHERE, Cluster, Node, Placement, Queue, Reason, UnknownName
from pollux.core.errors import Conflict, InvalidInput

__all__ = ["ClusterState", "time_up"]

_MOST_NAMES = 50


def time_up(record: JobRecord) -> float | None:
    """When a running job reaches its time limit; None if it has none, or does not run."""
    limit = record.spec.time_limit_seconds
    if limit is None or record.running_since is None:
        return None
    return record.running_since + max(limit - record.held_seconds, 0.0)


def _check_deadline(spec: JobSpec, at: float) -> None:
    if spec.deadline is not None and spec.deadline <= at:
        raise InvalidInput(
            f"job '{spec.id}' should have ended {at - spec.deadline:.0f} s ago, by its deadline; give a later one, "
            "or leave it out"
        )


class ClusterState:
    """All records; `active` are the jobs that have not ended, in the order of submission."""

    def __init__(self, cluster: Cluster, queues: Iterable[Queue] = ()) -> None:
        self.cluster = cluster
        self.queues: Mapping[str, Queue] = {queue.name: queue for queue in queues}
        self.jobs: dict[str, JobRecord] = {}
        self.active: dict[str, JobRecord] = {}
        self.trust = NodeTrust()
        self._due: dict[str, float] = {}

    def record(self, job_id: str) -> JobRecord:
        """The record of a job; UnknownName if there is none."""
        found = self.jobs.get(job_id)
        if found is None:
            raise self._unknown("job", job_id)
        return found

    def _unknown(self, what: str, job_id: str) -> UnknownName:
        """The error for an unknown job. It names the newest jobs only: there may be thousands."""
        return UnknownName(what, job_id, islice(reversed(self.jobs), _MOST_NAMES))

    def draft(self, spec: JobSpec, at: float) -> JobRecord:
        """The record of a new job, without adding it; refuses a job that could not be added."""
        if spec.id in self.jobs:
            raise Conflict(f"job '{spec.id}' is known already; give the new one another name")
        for other in spec.after:
            if other not in self.jobs:
                raise self._unknown("job to run after", other)
        waiting_for = tuple(other for other in spec.after if self.jobs[other].state is not JobState.SUCCEEDED)
        record = JobRecord(spec, at, resize_cost_seconds=spec.resize_cost_seconds, waiting_for=waiting_for)
        _check_deadline(spec, at)
        record.note_ready(at)
        record.view(at)  # refuses fields that no snapshot could hold, while the user waits for the answer
        if waiting_for:
            record.set_reason(at, self._why_after(waiting_for))
        return record

    def _why_after(self, waiting_for: tuple[str, ...]) -> Reason:
        """The reason of a new job that is to run after others: they have failed, or have not ended."""
        hopeless = tuple(other for other in waiting_for if self.jobs[other].state in ENDED)
        return Reason("dependency-failed" if hopeless else "waits-for-job", jobs=hopeless or waiting_for)

    def add(self, record: JobRecord) -> None:
        """Add a new or a restored job."""
        self.jobs[record.spec.id] = record
        if record.state not in ENDED:
            self.active[record.spec.id] = record
            self.note_due_time(record)

    def fail_if_orphaned(self, record: JobRecord, at: float) -> None:
        """End a new job at once if a job that it must run after has failed or was cancelled."""
        for other in record.waiting_for:
            if self.jobs[other].state in ENDED:
                self._orphan(record, self.jobs[other], at)
                return

    def place(self, record: JobRecord, placement: Placement, at: float) -> None:
        """Give the job `placement` from `at` on, as a new generation unless nothing changes."""
        if placement == record.placement:
            return
        record.attained_gpu_seconds = record.attained(at)
        self._halt(record, at)
        record.held_since = at
        record.placement = placement
        record.generation += 1
        if not placement:
            record.capped_until = None
        else:
            record.num_starts += 1
            record.largest_gpus = max(record.largest_gpus, placement.num_gpus)
            if record.started_at is None:
                record.started_at = at
        record.forget_view()
        self.note_due_time(record)

    def run(self, record: JobRecord, at: float) -> None:
        """Note that all replicas of a job's generation run."""
        record.running_since = at
        if record.capped_until is None:
            record.refusals = 0
        self.note_due_time(record)

    def _halt(self, record: JobRecord, at: float) -> None:
        record.held_seconds, record.running_since = record.running_seconds(at), None

    def renew(self, record: JobRecord, at: float) -> None:
        """Give a job a new generation on the GPUs that it holds."""
        self._halt(record, at)
        self.note_due_time(record)
        record.generation += 1
        record.num_starts += 1
        record.forget_view()

    def requeue(self, record: JobRecord, at: float, reason: Reason) -> Placement:
        """Take its GPUs from a job and let it wait again; returns its old placement."""
        before, after = record.placement, step(record.spec.id, record.state, JobState.QUEUED)
        self.place(record, NOWHERE, at)
        record.state = after
        record.note_ready(at)
        record.set_reason(at, reason)
        return before

    def end(self, record: JobRecord, state: JobState, at: float, detail: str, reason: Reason) -> None:
        """End a job, and the jobs that must run after it if it did not succeed."""
        self._end(record, state, at, detail, reason)
        ended = [record]
        while ended:
            last = ended.pop()
            for follower in [other for other in self.active.values() if last.spec.id in other.waiting_for]:
                if last.state is JobState.SUCCEEDED:
                    left = tuple(job_id for job_id in follower.waiting_for if job_id != last.spec.id)
                    follower.waiting_for = left
                    follower.note_ready(at)
                    follower.set_reason(at, Reason("waits-for-job", jobs=left) if left else None)
                else:
                    self._orphan(follower, last, at)
                    ended.append(follower)

    def _orphan(self, record: JobRecord, other: JobRecord, at: float) -> None:
        detail = f"it was to run after job '{other.spec.id}', which is {other.state}"
        self._end(record, JobState.FAILED, at, detail, Reason("dependency-failed", jobs=(other.spec.id,)))

    def _end(self, record: JobRecord, state: JobState, at: float, detail: str, reason: Reason) -> None:
        after = step(record.spec.id, record.state, state, record.detail)
        self.place(record, NOWHERE, at)
        record.state, record.ended_at, record.detail = after, at, detail
        record.eligible_at, record.capped_until, record.quiet_until, record.waiting_for = None, None, None, ()
        record.set_reason(at, reason)
        del self.active[record.spec.id]
        self._due.pop(record.spec.id, None)

    def forget(self, ended_before: float) -> None:
        """Drop jobs that ended before that time; no job waits for an ended one."""
        self.jobs = {job_id: record for job_id, record in self.jobs.items() if not record.is_over(ended_before)}

    # Nodes and queues

    def add_node(self, node: Node) -> None:
        """Add a node, or replace one whose description has changed."""
        nodes = [node if other.id == node.id else other for other in self.cluster.nodes]
        if node.id not in self.cluster.by_id:
            nodes.append(node)
        self.cluster = Cluster(tuple(nodes))

    def remove_node(self, node_id: str) -> list[JobRecord]:
        """Remove a node; returns the jobs that hold GPUs there, whose placements still name it."""
        self.cluster = Cluster(tuple(node for node in self.cluster.nodes if node.id != node_id))
        return [record for record in self.active.values() if record.placement.on(node_id)]

    def set_queue(self, queue: Queue) -> None:
        """Add a queue, or replace one whose weight or quota has changed."""
        # A new mapping, since a snapshot may hold the old one.
        self.queues = {**self.queues, queue.name: queue}

    # Time

    def skip(self, seconds: float, away: bool) -> None:
        """Leave seconds that the clock skipped out of all durations; `away`: out of the ages of ended jobs only."""
        for record in self.jobs.values():
            if record.ended_at is not None:
                record.aged_since = (record.ended_at if record.aged_since is None else record.aged_since) + seconds
            elif not away:
                record.skip(seconds)
                self.note_due_time(record)

    # What is due

    def note_due_time(self, record: JobRecord) -> None:
        """Note the earliest end of the job's pauses and restrictions after failures, and of its time limit."""
        times = (record.eligible_at, record.capped_until, record.quiet_until, time_up(record))
        due = min((at for at in times if at is not None), default=None)
        if due is None:
            self._due.pop(record.spec.id, None)
        else:
            self._due[record.spec.id] = due

    @property
    def next_due(self) -> float | None:
        """The earliest time at which something is due."""
        return min(self._due.values(), default=None)

    def due(self, at: float) -> list[JobRecord]:
        """Jobs for which something is due, in the order of submission."""
        if not any(due <= at for due in self._due.values()):
            return []
        return [record for job_id, record in self.active.items() if self._due.get(job_id, at + 1.0) <= at]
