"""Why a job got its GPUs: the codes, and the other jobs involved. Decisions do not depend on this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pollux.core import Allocation, JobView, Reason, Snapshot

__all__ = ["Holders", "change_code", "named"]

# More names would not help a reader.
_MOST_NAMES = 3


def named(gpus_by_job: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """The ids of the jobs with most GPUs; among equals, in the given order."""
    return tuple(job_id for _, job_id in sorted(gpus_by_job, key=lambda entry: -entry[0])[:_MOST_NAMES])


def change_code(before: int, after: int) -> str:
    """The word for a change of the number of GPUs."""
    if not after:
        return "preempted" if before else "waits-for-gpus"
    if not before:
        return "started"
    if after == before:
        return "moved"
    return "grew" if after > before else "shrank"


class Holders:
    """The jobs that hold most of what others wait for, in the cluster or in a queue."""

    def __init__(self, snapshot: Snapshot, allocation: Allocation) -> None:
        held = [(allocation[job.id].num_gpus, job.id, job.queue) for job in snapshot.jobs if allocation.get(job.id)]
        self._all = named((gpus, job_id) for gpus, job_id, _ in held)
        self._by_queue: Mapping[str, tuple[str, ...]] = {
            queue: named((gpus, job_id) for gpus, job_id, other in held if other == queue)
            for queue in {queue for _, _, queue in held}
        }

    def blamed(self, job: JobView, reason: Reason) -> Reason:
        """The reason for which a job waits, with the jobs that hold what it waits for."""
        if reason.code == "waits-for-quota":
            return replace(reason, jobs=self._by_queue.get(job.queue, ()))
        if reason.code in ("waits-for-gpus", "no-room"):
            return replace(reason, jobs=self._all)
        return reason
