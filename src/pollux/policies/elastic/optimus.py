"""Optimus (Peng et al., EuroSys'18) with an oracle, as in the published comparison with Pollux."""

from __future__ import annotations

import heapq

from pollux.core import NOWHERE, BatchMode, Decision, JobView, Placement, Snapshot
from pollux.policies.packing.capacity import Room
from pollux.policies.reasons import Holders

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
        """Choose counts by marginal gain, then places."""
        room = Room(snapshot)
        allocation = _pinned(snapshot, room)
        free_jobs = [job for job in snapshot.jobs if job.id not in allocation]
        counts = _count(snapshot, room, free_jobs)
        _keep(snapshot, room, free_jobs, counts, allocation)
        waiting = [job for job in free_jobs if job.id not in allocation]
        for job in sorted(waiting, key=lambda job: counts[job.id] or snapshot.cluster.num_gpus + 1):
            placement = _place(room, job, counts[job.id] or job.limits.min_gpus)
            if placement:
                allocation[job.id] = placement
                room.take(job, placement)
        holders = Holders(snapshot, allocation)
        reasons = {
            job.id: holders.blamed(job, room.refusal(job, job.limits.min_gpus))
            for job in waiting
            if job.id not in allocation
        }
        return Decision(allocation, reasons=reasons)


def _pinned(snapshot: Snapshot, room: Room) -> dict[str, Placement]:
    """Pinned jobs where they are, taken from the room."""
    allocation: dict[str, Placement] = {}
    for job in snapshot.jobs:
        if job.limits.pinned and (current := snapshot.placement(job.id)):
            allocation[job.id] = current
            room.take(job, current)
    return allocation


def _must_keep(snapshot: Snapshot, job: JobView) -> bool:
    return not job.limits.preemptible and bool(snapshot.placement(job.id))


def _keep(
    snapshot: Snapshot, room: Room, jobs: list[JobView], counts: dict[str, int], allocation: dict[str, Placement]
) -> None:
    """Place the jobs that may not be stopped, then those whose count has not changed, where they are."""
    must_keep = [job for job in jobs if _must_keep(snapshot, job)]
    for job in must_keep:
        room.take(job, snapshot.placement(job.id))
    for job in must_keep:
        allocation[job.id] = _resize(room, job, snapshot.placement(job.id), counts[job.id])
    for job in jobs:
        current = snapshot.placement(job.id)
        same = current.num_gpus == counts[job.id] and job.id not in allocation
        if current and same and room.can_keep(job, current):
            allocation[job.id] = current
            room.take(job, current)


def _count(snapshot: Snapshot, room: Room, jobs: list[JobView]) -> dict[str, int]:
    """GPUs for each job; none where no GPUs suit it, so that it takes nothing from the others."""
    quota = {job.queue: room.quota(job.queue) for job in jobs}
    caps = {job.id: _most(snapshot, room, job) for job in jobs}
    counts = _minima(snapshot, jobs, room.num_free, quota, caps)
    left = room.num_free - sum(counts.values())

    def entry(order: int, job: JobView) -> tuple[float, int, JobView]:
        return -_gain(job, counts[job.id], caps[job.id]), order, job

    gains = [entry(order, job) for order, job in enumerate(jobs) if counts[job.id]]
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
        heapq.heappush(gains, entry(order, job))
    return counts


def _minima(
    snapshot: Snapshot, jobs: list[JobView], left: int, quota: dict[str, float], caps: dict[str, int]
) -> dict[str, int]:
    """Give each job its minimum while `left` GPUs last, the smallest minimum first; count it against its quota."""
    counts = {job.id: 0 for job in jobs}
    for job in sorted(jobs, key=lambda job: (not _must_keep(snapshot, job), job.limits.min_gpus)):
        minimum = job.limits.min_gpus
        if _must_keep(snapshot, job) or minimum <= min(left, quota[job.queue], caps[job.id]):
            counts[job.id] = minimum
            left -= minimum
            quota[job.queue] -= minimum
    return counts


def _most(snapshot: Snapshot, room: Room, job: JobView) -> int:
    """The most GPUs that suit the job while only pinned jobs hold any."""
    current = snapshot.placement(job.id)
    return max(room.most(job), current.num_gpus if room.can_keep(job, current) else 0)


def _gain(job: JobView, count: int, cap: int) -> float:
    """`(T(k) - T(k+1)) * Q`, in seconds; 0 for a job without oracle or at its cap."""
    if job.oracle is None or count >= cap:
        return 0.0
    saved = job.oracle.step_seconds(count) - job.oracle.step_seconds(count + 1)
    return saved * job.oracle.remaining_steps()


def _place(room: Room, job: JobView, count: int) -> Placement:
    """`count` GPUs, or as many as constraints other than the number of GPUs leave."""
    counts = range(count, job.limits.min_gpus - 1, -1)
    return next((found for attempt in counts if (found := room.spread(job, attempt))), NOWHERE)


def _resize(room: Room, job: JobView, current: Placement, count: int) -> Placement:
    """Move a job that may not be stopped to `count` GPUs, or as near as there is room."""
    room.give(job, current)
    target = current
    if current.num_gpus != count or not room.can_keep(job, current):
        target = _place(room, job, count) or room.part(job, current, job.limits.min_gpus) or current
    room.take(job, target)
    return target
