"""Finish-time fairness of one job as it looks now; over all jobs it is in `summary`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pollux.controller import ENDED, JobRecord
from pollux.core import Cluster
from pollux.service.rates import largest_nodes, packed, placed, suitable

__all__ = ["finish_time_fairness"]


def finish_time_fairness(
    record: JobRecord,
    total: float | None,
    cluster: Cluster,
    num_active: int,
    now: float,
    nodes: Mapping[str, int] | None = None,
) -> float | None:
    """ρ = (time since submission + time left) / time alone on the fair share; above 1 is worse than alone.

    The fair share is GPUs / jobs that have not ended, as of now, within the job's limits; below its fewest GPUs k0 the
    time grows as k0/share. Who holds nothing is taken to get its share now. None without a model or the work in all,
    `total`. `nodes` are the largest of each type, where the caller knows them already.
    """
    model, left = record.goodput, record.remaining
    if record.state in ENDED or model is None or left is None or not total or not cluster.num_gpus:
        return None
    limits = record.spec.limits
    share = cluster.num_gpus / max(num_active, 1)
    count = max(min(math.floor(share), limits.max_gpus), limits.min_gpus)
    largest = suitable(largest_nodes(cluster) if nodes is None else nodes, limits)
    fair = packed(model, count, largest) * min(share / count, 1.0)
    rate = placed(record, cluster) or fair
    if fair <= 0.0 or rate <= 0.0:
        return None
    return (max(now - record.submitted_at, 0.0) + left / rate) / (total / fair)
