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
        # Queues are kept as they were; who sinks into one joins its end. Lost memory only costs that order.
        thresholds = self.thresholds_gpu_seconds
        level = {job.id: bisect_right(thresholds, job.attained_gpu_seconds) for job in snapshot.jobs}
        queues: list[list[str]] = [[] for _ in range(len(thresholds) + 1)]
        moved: list[str] = []
        last = snapshot.memory.queues if isinstance(snapshot.memory, _Queues) else ()
        for depth, queue in enumerate(last):
            for job_id in queue:
                if job_id in level:
                    (queues[depth] if level[job_id] == depth else moved).append(job_id)
        known = {job_id for queue in last for job_id in queue}
        for job_id in moved + [job.id for job in snapshot.jobs if job.id not in known]:
            queues[level[job_id]].append(job_id)
        jobs = {job.id: job for job in snapshot.jobs}
        decision = admit(snapshot, [jobs[job_id] for queue in queues for job_id in queue])
        return replace(decision, memory=_Queues(tuple(tuple(queue) for queue in queues)))
