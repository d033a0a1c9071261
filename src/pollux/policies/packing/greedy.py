"""Walk jobs in an order and admit what fits: the mechanism behind FIFO, SRTF, LAS and Tiresias."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from pollux.core import NOWHERE, Decision, JobView, Placement, Reason, Snapshot
from pollux.policies.packing.capacity import Room
from pollux.policies.reasons import Holders

__all__ = ["admit", "admit_in_turn", "wanted_gpus"]


def wanted_gpus(job: JobView) -> int:
    """What the user asked for, within the job's limits."""
    return min(max(job.requested_gpus, job.limits.min_gpus), job.limits.max_gpus)


def admit(snapshot: Snapshot, order: Sequence[JobView]) -> Decision:
    """Give jobs the GPUs they asked for, in `order`, while GPUs last; a job that is not admitted loses its own.

    Running jobs that are admitted keep their placement; new ones take from the nodes with most free GPUs.
    Pinned and non-preemptible jobs that run go first. A job that no GPUs suit blocks no other.
    """
    draft = _Draft(snapshot, order)
    line = draft.line(order)
    # Counting alone may admit a job that finds no GPUs to suit it: then the others are admitted again without
    # it, so that it does not keep out, or even stop, jobs that could run.
    left_out: set[str] = set()
    while failed := draft.admit_by_count([job for job in line if job.id not in left_out]):
        left_out |= failed
    draft.admit_in_turn(job for job in line if job.id in left_out)
    return draft.decision()


def admit_in_turn(snapshot: Snapshot, order: Sequence[JobView], *, strict: bool) -> Decision:
    """Give jobs the GPUs they asked for, in `order`, while GPUs last; running jobs go on.

    `strict`: the first job that has to wait blocks those behind it, unless it would not fit an empty cluster.
    """
    draft = _Draft(snapshot, order)
    running = [job for job in order if snapshot.placement(job.id) and job.id not in draft.allocation]
    for job in running:
        if draft.room.can_keep(job, snapshot.placement(job.id)):
            draft.take(job, snapshot.placement(job.id))
    draft.admit_in_turn(draft.line(running))
    draft.admit_in_turn(draft.line(job for job in order if not snapshot.placement(job.id)), strict)
    return draft.decision()


class _Draft:
    """A decision being built; begins with the jobs that may not be stopped."""

    def __init__(self, snapshot: Snapshot, order: Sequence[JobView]) -> None:
        self.snapshot, self.order = snapshot, order
        self.room = Room(snapshot)
        self.allocation: dict[str, Placement] = {}
        self.reasons: dict[str, Reason] = {}
        self._empty = Room(snapshot)
        fixed = [
            job for job in order if snapshot.placement(job.id) and (job.limits.pinned or not job.limits.preemptible)
        ]
        for job in fixed:
            self.take(job, snapshot.placement(job.id))
        for job in fixed:
            self._adapt(job, snapshot.placement(job.id))

    def decision(self) -> Decision:
        holders = Holders(self.snapshot, self.allocation)
        for job in self.order:
            if job.id not in self.allocation and job.id not in self.reasons:
                self.reasons[job.id] = holders.blamed(job, self.room.refusal(job, wanted_gpus(job)))
        return Decision(self.allocation, reasons=self.reasons)

    def take(self, job: JobView, placement: Placement) -> None:
        self.allocation[job.id] = placement
        self.room.take(job, placement)

    def _adapt(self, job: JobView, current: Placement) -> None:
        """Resize a job that may neither be stopped nor stay as it is; if there is no way, it stays."""
        self.room.give(job, current)
        target = current
        if not self.room.can_keep(job, current):
            counts = range(wanted_gpus(job), job.limits.min_gpus - 1, -1)
            parts = (self.room.part(job, current, count) for count in counts)
            others = (self.room.spread(job, count) for count in counts)
            target = next((found for found in chain(parts, others) if found), current)
        self.take(job, target)

    def line(self, order: Iterable[JobView]) -> list[JobView]:
        """Jobs still to be placed, without those that would not fit an empty cluster."""
        line = []
        for job in order:
            if job.id in self.allocation:
                continue
            if self.snapshot.placement(job.id) or self._empty.spread(job, wanted_gpus(job)):
                line.append(job)
            else:
                wanted, queue = wanted_gpus(job), self.snapshot.queues.get(job.queue)
                lacks = self.room.whole.lacks(job.limits, queue, wanted) or {"gpus": float(wanted)}
                self.reasons[job.id] = Reason("fits-nowhere", lacks)
        return line

    def admit_in_turn(self, line: Iterable[JobView], strict: bool = False) -> None:
        first: tuple[str, ...] = ()
        for job in line:
            placement = NOWHERE if first else self.room.spread(job, wanted_gpus(job))
            if placement:
                self.take(job, placement)
            elif first:
                self.reasons[job.id] = Reason("behind-another", {"gpus": wanted_gpus(job)}, first)
            elif strict:
                first = (job.id,)

    def admit_by_count(self, line: list[JobView]) -> set[str]:
        """Admit by count, then place; if some jobs find no GPUs, place none and return their ids."""
        admitted = self._fitting(line)
        placed: dict[str, Placement] = {}
        for job in admitted:
            current = self.snapshot.placement(job.id)
            if current.num_gpus == wanted_gpus(job) and self.room.can_keep(job, current):
                placed[job.id] = current
                self.room.take(job, current)
        for job in admitted:
            if job.id not in placed:
                placed[job.id] = self.room.spread(job, wanted_gpus(job))
                self.room.take(job, placed[job.id])
        failed = {job_id for job_id, placement in placed.items() if not placement}
        if failed:
            for job in admitted:
                self.room.give(job, placed[job.id])
        else:
            self.allocation.update(placed)
        return failed

    def _fitting(self, line: list[JobView]) -> list[JobView]:
        closed = {node.id for node in self.snapshot.cluster.nodes if not node.schedulable}
        left = self.room.num_free
        quota = {job.queue: self.room.quota(job.queue) for job in line}
        admitted: list[JobView] = []
        for job in line:
            wanted = wanted_gpus(job)
            # No other job can use GPUs held on a closed node, so they are not counted against the rest.
            held = sum(count for node, count in self.snapshot.placement(job.id).shares if node in closed)
            need = wanted - min(held, wanted)
            if need <= left and wanted <= quota[job.queue]:
                left -= need
                quota[job.queue] -= wanted
                admitted.append(job)
        return admitted
