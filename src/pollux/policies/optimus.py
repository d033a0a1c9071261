"""Optimus (Peng et al., EuroSys'18) with an oracle, as in the published comparison with Pollux."""

from __future__ import annotations

import heapq

from pollux.core import NOWHERE, BatchMode, Decision, JobView, Placement, Reason, Snapshot
from pollux.policies._room import Room

__all__ = ["OptimusOracle"]


class OptimusOracle:
    """Marginal gain in completion time, with true step times T and remaining steps Q at the user's batch.

    Every job gets its minimum while GPUs last; then one GPU after another goes to the largest
    `(T(k) - T(k+1)) * Q` until none gains. Jobs whose count changed are placed anew, smallest first, from the
    emptiest node.
    """

    name = "optimus-oracle"
    needs: frozenset[str] = frozenset({"oracle"})
    batch: BatchMode = "fixed"

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Counts by marginal gain, then placement."""
        room = Room(snapshot)
        allocation: dict[str, Placement] = {}
        for job in snapshot.jobs:
            current = snapshot.placement(job.id)
            if current and job.limits.pinned:
                allocation[job.id] = current
                room.take(job, current)
        free_jobs = [job for job in snapshot.jobs if job.id not in allocation]
        counts = _count(snapshot, room, free_jobs)
        for job in free_jobs:
            current = snapshot.placement(job.id)
            if current and current.num_gpus == counts[job.id] and room.can_keep(job, current):
                allocation[job.id] = current
                room.take(job, current)
        changed = sorted(
            (job for job in free_jobs if job.id not in allocation and counts[job.id]),
            key=lambda job: (job.limits.preemptible or not snapshot.placement(job.id), counts[job.id]),
        )
        reasons: dict[str, Reason] = {}
        for job in changed:
            allocation[job.id] = _place(snapshot, room, job, counts[job.id])
            if not allocation[job.id]:
                reasons[job.id] = Reason("no-room", {"gpus": counts[job.id]})
            room.take(job, allocation[job.id])
        return Decision({key: value for key, value in allocation.items() if value}, reasons=reasons)


def _count(snapshot: Snapshot, room: Room, jobs: list[JobView]) -> dict[str, int]:
    closed = {node.id for node in snapshot.cluster.nodes if not node.schedulable}
    left = sum(count for node, count in room.gpus.items() if node not in closed)
    quota = {job.queue: room.quota(job.queue) for job in jobs}
    counts = {job.id: 0 for job in jobs}

    def must_keep(job: JobView) -> bool:
        return not job.limits.preemptible and bool(snapshot.placement(job.id))

    for job in sorted(jobs, key=lambda job: (not must_keep(job), job.limits.min_gpus)):
        minimum = job.limits.min_gpus
        if minimum <= min(left, quota[job.queue]) or must_keep(job):
            counts[job.id] = minimum
            left -= minimum
            quota[job.queue] -= minimum
    gains = [(-_gain(job, counts[job.id]), order, job) for order, job in enumerate(jobs) if counts[job.id]]
    heapq.heapify(gains)
    while left > 0 and gains:
        negative, order, job = heapq.heappop(gains)
        if negative >= 0:
            break
        if quota[job.queue] < 1:
            continue
        counts[job.id] += 1
        left -= 1
        quota[job.queue] -= 1
        heapq.heappush(gains, (-_gain(job, counts[job.id]), order, job))
    return counts


def _gain(job: JobView, count: int) -> float:
    if job.oracle is None or count >= job.limits.max_gpus:
        return 0.0
    return (job.oracle.step_seconds(count) - job.oracle.step_seconds(count + 1)) * job.oracle.remaining_steps()


def _place(snapshot: Snapshot, room: Room, job: JobView, count: int) -> Placement:
    """`count` GPUs, or as many as constraints other than the number of GPUs leave, or where it is."""
    for attempt in range(count, job.limits.min_gpus - 1, -1):
        placement = room.spread(job, attempt)
        if placement:
            return placement
    current = snapshot.placement(job.id)
    return current if current and not job.limits.preemptible else NOWHERE
