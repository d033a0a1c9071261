"""Least attained service: who has used the fewest GPU-seconds goes first (2D, as in Tiresias)."""

from __future__ import annotations

from pollux.core import BatchMode, Decision, InvalidInput, Snapshot
from pollux.policies.packing.greedy import admit

__all__ = ["Las"]


class Las:
    """Order by attained GPU-seconds, then submission; preemptive.

    Service is compared in steps of `quantum_gpu_seconds`: compared exactly, two equal jobs would preempt
    each other at every decision and neither would get past its restart.
    """

    name = "las"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def __init__(self, quantum_gpu_seconds: float = 3600.0) -> None:
        if not quantum_gpu_seconds > 0:
            raise InvalidInput(f"quantum_gpu_seconds is {quantum_gpu_seconds}; give a number above 0")
        self.quantum_gpu_seconds = quantum_gpu_seconds

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Admit in order of attained service."""

        def least_first(index: int) -> tuple[float, bool, float, int]:
            job = snapshot.jobs[index]
            steps = job.attained_gpu_seconds // self.quantum_gpu_seconds
            return steps, not snapshot.placement(job.id), job.submitted_at, index

        order = sorted(range(len(snapshot.jobs)), key=least_first)
        return admit(snapshot, [snapshot.jobs[index] for index in order])
