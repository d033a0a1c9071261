"""How many nodes the jobs at hand could use, for engines that can lend more or take some back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pollux.controller import JobRecord, JobState
from pollux.core import Cluster

__all__ = ["nodes_wanted", "somebody_waits"]


def nodes_wanted(jobs: Iterable[JobRecord], cluster: Cluster, desired: int | None = None) -> int:
    """Nodes of the largest size there is that would hold every unfinished job at its most GPUs.

    Jobs that are paused, or wait for others, want none. While no node is known, one is enough to find out how large
    they are; without jobs, none is wanted. `desired` is what a policy decided, where it decides that.
    """
    if desired is not None:
        return max(desired, 0)
    most = sum(record.spec.limits.max_gpus for record in jobs if _wants(record))
    size = max((node.num_gpus for node in cluster.nodes), default=0)
    if most == 0 or size == 0:
        return min(most, 1)
    return math.ceil(most / size)


def somebody_waits(jobs: Iterable[JobRecord]) -> bool:
    """Whether a job that wants GPUs has none."""
    return any(_wants(record) and not record.placement for record in jobs)


def _wants(record: JobRecord) -> bool:
    return record.state is not JobState.PAUSED and not record.waiting_for
