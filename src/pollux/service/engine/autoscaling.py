"""How many nodes the present jobs could use, for backends that can borrow more or give some back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pollux.controller import JobRecord, JobState
from pollux.core import Cluster

__all__ = ["desired_num_nodes", "is_job_waiting"]


def desired_num_nodes(jobs: Iterable[JobRecord], cluster: Cluster, desired: int | None = None) -> int:
    """The number of nodes of the largest present size that would hold every unfinished job at its maximum.

    Jobs that are paused or must run after others do not count. While no node is known, the answer is one, to learn the
    size of nodes; without jobs it is 0. `desired` is the decision of a policy that decides this itself.
    """
    if desired is not None:
        return max(desired, 0)
    most = sum(record.spec.limits.max_gpus for record in jobs if _wants(record))
    size = max((node.num_gpus for node in cluster.nodes), default=0)
    if most == 0 or size == 0:
        return min(most, 1)
    return math.ceil(most / size)


def is_job_waiting(jobs: Iterable[JobRecord]) -> bool:
    """Whether any job that could run has no GPUs."""
    return any(_wants(record) and not record.placement for record in jobs)


def _wants(record: JobRecord) -> bool:
    return record.state is not JobState.PAUSED and not record.waiting_for
