"""How many nodes the jobs at hand could use, for engines that can lend more or take some back. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pollux.controller import JobRecord
from pollux.core import Cluster

__all__ = ["nodes_wanted"]


def nodes_wanted(jobs: Iterable[JobRecord], cluster: Cluster) -> int:
    """Nodes of the largest size there is that would hold every unfinished job at its most GPUs.

    While no node is known, one is enough to find out how large they are; without jobs, none is wanted.
    """
    most = sum(record.spec.limits.max_gpus for record in jobs)
    size = max((node.num_gpus for node in cluster.nodes), default=0)
    if most == 0 or size == 0:
        return min(most, 1)
    return math.ceil(most / size)
