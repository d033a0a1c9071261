"""Walk jobs in an order and admit what fits: the mechanism behind FIFO, SRTF, LAS and Tiresias."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.core import Decision, JobView, Placement, Reason, Snapshot
from pollux.policies._room import Room

__all__ = ["admit"]


def admit(snapshot: Snapshot, order: Sequence[JobView], *, strict: bool = False, preempt: bool = True) -> Decision:
    """Give jobs the GPUs they asked for, in `order`, while GPUs last.

    Running jobs that are admitted keep their placement; new ones take from the nodes with most free GPUs.
    `strict`: the first job that does not fit blocks those behind it. Without `preempt`, and always for
    pinned and non-preemptible jobs, running jobs go first.
    """
    room = Room(snapshot)
    immovable = [job for job in order if snapshot.placement(job.id) and (not preempt or _fixed(job))]
    fixed = {job.id for job in immovable}
    allocation: dict[str, Placement] = {}
    reasons: dict[str, Reason] = {}
    for job in immovable:
        if room.can_keep(job, snapshot.placement(job.id)) or _fixed(job):
            allocation[job.id] = snapshot.placement(job.id)
            room.take(job, allocation[job.id])
    admitted = _admit_by_count(snapshot, room, [job for job in order if job.id not in fixed], strict, reasons)
    for job in admitted:
        current = snapshot.placement(job.id)
        if current and current.num_gpus == _wanted(job) and room.can_keep(job, current):
            allocation[job.id] = current
            room.take(job, current)
    for job in admitted:
        if job.id not in allocation:
            placement = room.spread(job, _wanted(job))
            if placement:
                allocation[job.id] = placement
                room.take(job, placement)
            else:
                reasons[job.id] = Reason("no-room", {"requested_gpus": _wanted(job)})
    return Decision(allocation, reasons=reasons)


def _fixed(job: JobView) -> bool:
    return job.limits.pinned or not job.limits.preemptible


def _wanted(job: JobView) -> int:
    return min(max(job.requested_gpus, job.limits.min_gpus), job.limits.max_gpus)


def _admit_by_count(
    snapshot: Snapshot, room: Room, order: Sequence[JobView], strict: bool, reasons: dict[str, Reason]
) -> list[JobView]:
    closed = {node.id for node in snapshot.cluster.nodes if not node.schedulable}
    left = sum(count for node, count in room.gpus.items() if node not in closed)
    quota = {job.queue: room.quota(job.queue) for job in order}
    admitted: list[JobView] = []
    for job in order:
        wanted = _wanted(job)
        # GPUs held on a closed node are no use to anybody else, so they are not counted against the rest.
        held = sum(count for node, count in snapshot.placement(job.id).shares if node in closed)
        need = wanted - min(held, wanted)
        if need <= left and wanted <= quota[job.queue]:
            left -= need
            quota[job.queue] -= wanted
            admitted.append(job)
            continue
        reasons[job.id] = Reason("waits-for-gpus", {"requested_gpus": wanted, "free_gpus": left})
        if strict:
            break
    return admitted
