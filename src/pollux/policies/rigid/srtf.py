"""Shortest remaining time first, with the remaining time from an oracle."""

from __future__ import annotations

from pollux.core import BatchMode, Decision, JobView, Snapshot
from pollux.policies.packing.greedy import admit, wanted_gpus

__all__ = ["Srtf"]


class Srtf:
    """Order by step time on the requested GPUs x remaining steps; preemptive."""

    name = "srtf"
    needs: frozenset[str] = frozenset({"oracle"})
    batch: BatchMode = "fixed"

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Admit in order of remaining time."""

        def remaining_seconds(job: JobView) -> float:
            if job.oracle is None:
                return 0.0
            return job.oracle.step_seconds(wanted_gpus(job)) * job.oracle.remaining_steps()

        order = sorted(snapshot.jobs, key=lambda job: (remaining_seconds(job), job.submitted_at))
        return admit(snapshot, order)
