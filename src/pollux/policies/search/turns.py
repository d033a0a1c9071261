"""Turns, for when there are more jobs than GPUs: who has held or missed GPUs since when, and what that weighs.

The published objective does not care which of many equal jobs wait, so the same ones could wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pollux.core import Allocation, Snapshot

__all__ = ["Turns", "turn_weights"]

# A turn lasts so many times what a job's resize costs: of the time, at most a tenth goes into changing.
_COSTS_PER_TURN = 10.0
_LEAST_TURN_SECONDS = 10.0
# A job that waits counts for at most so many times more.
_MOST_HUNGER = 2.0
# One that holds GPUs counts for less by this share for every doubling of what it has had, and at most by that.
_YIELD = 0.02
_MOST_YIELD = 0.3


@dataclass(frozen=True, slots=True)
class Turns:
    """Since when each job has held something, or nothing: (holds, since)."""

    since: Mapping[str, tuple[bool, float]] = field(default_factory=dict)

    def after(self, snapshot: Snapshot, allocation: Allocation) -> Turns:
        """The turns once a decision is in force."""
        found: dict[str, tuple[bool, float]] = {}
        for job in snapshot.jobs:
            holds = bool(allocation.get(job.id))
            before = self.since.get(job.id, (not holds, snapshot.now))
            found[job.id] = before if before[0] == holds else (holds, snapshot.now)
        return Turns(found)


def turn_weights(snapshot: Snapshot, turns: Turns) -> npt.NDArray[np.float64] | None:
    """What each job's weight is to be multiplied by; `None` where nobody has to wait.

    With Q = 10 d, d a job's resize cost: 1 + (waited - Q) / Q, up to 3, for a job that waits longer than Q; 3 for one
    that has never held any GPU; and for one that holds some, and A GPU-seconds so far,
    1 - min(0.02 · log2(1 + A / Q), 0.3) · min(held / Q, 1): who has had most makes room first.
    """
    if sum(job.limits.min_gpus for job in snapshot.jobs) <= snapshot.cluster.num_gpus:
        return None
    weights = np.ones(len(snapshot.jobs))
    for i, job in enumerate(snapshot.jobs):
        turn = max(_COSTS_PER_TURN * job.resize_cost_seconds, _LEAST_TURN_SECONDS)
        holds = bool(snapshot.placement(job.id))
        held, since = turns.since.get(job.id, (holds, snapshot.now))
        seconds = max(snapshot.now - since, 0.0) if held == holds else 0.0
        if holds:
            had = math.log2(1.0 + job.attained_gpu_seconds / turn)
            weights[i] -= min(_YIELD * had, _MOST_YIELD) * min(seconds / turn, 1.0)
        elif not job.attained_gpu_seconds:
            weights[i] += _MOST_HUNGER
        elif seconds > turn:
            weights[i] += min((seconds - turn) / turn, _MOST_HUNGER)
    return weights
