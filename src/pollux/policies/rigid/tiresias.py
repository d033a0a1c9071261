"""Tiresias (Gu et al., NSDI'19), discretised two-dimensional LAS, as in the comparison with Pollux."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from pollux.core import BatchMode, Decision, InvalidInput, Snapshot
from pollux.policies.packing.greedy import admit

__all__ = ["Tiresias"]


@dataclass(frozen=True, slots=True)
class _Queues:
    """Job ids by queue, each in the order in which they joined it."""

    queues: tuple[tuple[str, ...], ...] = ()


class Tiresias:
    """Queues by attained GPU time: a job that reaches a threshold moves down one queue and never comes back.

    Within a queue, first in, first out. Both queues are walked and whatever fits is admitted. The published
    comparison uses two queues that part at 57,600 GPU-seconds and no promotion.
    """

    name = "tiresias"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def __init__(self, thresholds_gpu_seconds: tuple[float, ...] = (57_600.0,)) -> None:
        if list(thresholds_gpu_seconds) != sorted(set(thresholds_gpu_seconds)):
            raise InvalidInput(f"thresholds_gpu_seconds are {thresholds_gpu_seconds}; give them in rising order")
        self.thresholds_gpu_seconds = thresholds_gpu_seconds

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Admit queue by queue."""
        queues = self._queues(snapshot)
        jobs = {job.id: job for job in snapshot.jobs}
        decision = admit(snapshot, [jobs[job_id] for queue in queues for job_id in queue])
        return replace(decision, memory=_Queues(tuple(tuple(queue) for queue in queues)))

    def _queues(self, snapshot: Snapshot) -> list[list[str]]:
        """The queues of the last decision; a job that sinks into a queue joins its end.

        Lost memory costs only that order.
        """
        level = {job.id: bisect_right(self.thresholds_gpu_seconds, job.attained_gpu_seconds) for job in snapshot.jobs}
        last = snapshot.memory.queues if isinstance(snapshot.memory, _Queues) else ()
        before = {job_id: depth for depth, queue in enumerate(last) for job_id in queue if job_id in level}
        queues: list[list[str]] = [[] for _ in range(len(self.thresholds_gpu_seconds) + 1)]
        stay = [job_id for job_id, depth in before.items() if level[job_id] == depth]
        sunk = [job_id for job_id, depth in before.items() if level[job_id] != depth]
        for job_id in [*stay, *sunk, *(job.id for job in snapshot.jobs if job.id not in before)]:
            queues[level[job_id]].append(job_id)
        return queues
