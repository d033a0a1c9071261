"""How many nodes the present jobs could use, for backends that can borrow more or give some back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pollux.controller import JobRecord, JobState
from pollux.core import Cluster

__all__ = ["desired_num_nodes", "is_job_waiting"]


def desired_num_nodes(jobs: Iterable[JobRecord], cluster: Cluster, desired: int | None = None) -> int:
    """How many nodes, as large as the largest now, would hold every unfinished job at its most GPUs.

    Jobs that are paused, or wait for others, count for none. While no node is known, one is enough to find out how
    large nodes are; without jobs, none is needed. `desired` is what a policy decided, where it decides that.
    """
    if desired is not None:
        return max(desired, 0)
    most = sum(record.spec.limits.max_gpus for record in jobs if _wants(record))
    size = max((node.num_gpus for node in cluster.nodes), default=0)
    if most == 0 or size == 0:
        return min(most, 1)
    return math.ceil(most / size)


def is_job_waiting(jobs: Iterable[JobRecord]) -> bool:
    """Whether a job that wants GPUs has none."""
    return any(_wants(record) and not record.placement for record in jobs)


def _wants(record: JobRecord) -> bool:
    return record.state is not JobState.PAUSED and not record.waiting_for
