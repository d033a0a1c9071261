"""Turns, for when there are more jobs than GPUs: since when each has held or missed GPUs, and its weight.

The published objective does not say which of many equal jobs wait, so the same ones could wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pollux.core import Allocation, JobView, Snapshot

__all__ = ["Turns", "turn_weights"]

# A turn lasts at least this many times a job's resize cost: resizes take at most a tenth of the time.
_COSTS_PER_TURN = 10.0
_LEAST_TURN_SECONDS = 10.0
# And at least this share of the GPU-seconds that a job has had: a job that has run for long need not change often.
_SHARE_PER_TURN = 0.05
# The weight of a job that begins, until it has had this many of its shortest turns; then that of a job in its turn, or
# that has waited for as long as its turn lasts.
_BEGINS, _FIRST_TURNS = 5.0, 2.0
_IN_TURN = 3.0
# By how much the weight of a job that needs more than the fair share grows in each of its turns that it waits.
_IMPATIENCE = 4.0
# A job that holds GPUs loses this share of its weight for each doubling of what it has had, at most the second one.
_YIELD, _MOST_YIELD = 0.02, 0.3


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
    """What each job's weight is to be multiplied by; `None` if no job has to wait.

    With A the GPU-seconds that a job has had, d its resize cost, L = max(10 d, 10 s) and Q = max(L, 0.05 A) its turn:
    5 for one that never held any GPU, or holds some and has A < 2 L; 3 for other holders for the time Q; then 1;
    and 1 + 2 · min(waited / Q, 1) for one that waits. A job that holds GPUs yields a share of that,
    min(0.02 · log2(1 + A / L), 0.3): among equals, the one that has had most makes room first.

    A job that needs G > 1 times the fair share counts for G jobs, each with A / G, but with 10 in its turn, so that
    new jobs do not end it, and with 1 + 4 · waited / Q while it waits, without bound.
    """
    if sum(job.limits.min_gpus for job in snapshot.jobs) <= snapshot.cluster.num_gpus:
        return None
    fair = max(math.ceil(snapshot.cluster.num_gpus / len(snapshot.jobs)), 1)
    return np.array([_turn_weight(snapshot, job, turns, job.limits.min_gpus / fair) for job in snapshot.jobs])


def _turn_weight(snapshot: Snapshot, job: JobView, turns: Turns, gang: float) -> float:
    many = max(gang, 1.0)
    had, holds = job.attained_gpu_seconds / many, bool(snapshot.placement(job.id))
    least = max(_COSTS_PER_TURN * job.resize_cost_seconds, _LEAST_TURN_SECONDS)
    turn = max(least, _SHARE_PER_TURN * had)
    held, since = turns.since.get(job.id, (holds, snapshot.now))
    seconds = max(snapshot.now - since, 0.0) if held == holds else 0.0
    if not holds and gang > 1.0:
        return gang * (1.0 + _IMPATIENCE * seconds / turn)
    if not holds:
        return 1.0 + (_IN_TURN - 1.0) * min(seconds / turn, 1.0) if had else _BEGINS
    if gang > 1.0 and seconds < turn:
        weight = 2.0 * _BEGINS
    elif had < _FIRST_TURNS * least:
        weight = _BEGINS
    else:
        weight = _IN_TURN if seconds < turn else 1.0
    return many * weight * (1.0 - min(_YIELD * math.log2(1.0 + had / least), _MOST_YIELD))
