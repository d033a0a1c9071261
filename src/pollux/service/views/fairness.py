"""Finish-time fairness of one job at one moment; over all jobs it is in `cluster_summary`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pollux.core import Cluster
from pollux.service.views.goodput_curves import largest_nodes, packed, placed, suitable
from pollux.service.views.job_board import JobEntry

__all__ = ["Fairness"]


@dataclass(frozen=True, slots=True)
class Fairness:
    """Computes fairness from the cluster, the number of unfinished jobs, and the time.

    It changes with each of them, so entries do not hold it: it is computed for each answer.
    """

    cluster: Cluster
    num_active: int
    now: float

    def of(self, entry: JobEntry) -> float | None:
        """ρ = (time since submission + time left) / time alone on the fair share; above 1 is worse than alone.

        The fair share is GPUs / jobs that have not ended, as of now, within the job's limits; below its fewest GPUs k0
        the time grows as k0/share. A job without GPUs is taken to get its share now. None for a job that has ended,
        and without a model or the total work.
        """
        return entry.work_out("fairness", lambda: self._of(entry))

    def _of(self, entry: JobEntry) -> float | None:
        record = entry.record
        total: float | None = entry.report.get("total_progress")
        model, left = record.goodput, record.remaining
        if entry.ended or model is None or left is None or not total or not self.cluster.num_gpus:
            return None
        limits = record.spec.limits
        share = self.cluster.num_gpus / max(self.num_active, 1)
        count = max(min(math.floor(share), limits.max_gpus), limits.min_gpus)
        fair = packed(model, count, suitable(largest_nodes(self.cluster), limits)) * min(share / count, 1.0)
        rate = placed(record, self.cluster) or fair
        if fair <= 0.0 or rate <= 0.0:
            return None
        rho = (max(self.now - record.submitted_at, 0.0) + left / rate) / (total / fair)
        return rho if math.isfinite(rho) else None
