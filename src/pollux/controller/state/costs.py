"""What a change of its GPUs has cost a job, by kind, and what the next one will; pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

__all__ = ["LIVE_KINDS", "RESTART", "Costs", "likely_seconds", "medians", "with_pause"]

LIVE_KINDS = ("grow", "shrink", "move", "recover")
"""Changes in living processes: more replicas, fewer, as many elsewhere, and fewer after a loss."""

RESTART = "restart"
"""A change by ending all processes and starting others from the checkpoint."""

Costs = Mapping[str, tuple[float, ...]]
"""The last pauses of each kind, in seconds, oldest first; to be replaced, not changed."""

_KEPT = 5


def with_pause(costs: Costs, kind: str, seconds: float) -> Costs:
    """The costs with one more pause; only the last five of each kind are kept."""
    return {**costs, kind: (*costs.get(kind, ()), seconds)[-_KEPT:]}


def medians(costs: Costs) -> dict[str, float]:
    """The median pause of each kind that was measured."""
    return {kind: statistics.median(pauses) for kind, pauses in costs.items() if pauses}


def likely_seconds(costs: Costs, live: bool, estimate: float, failed: float = 0.0) -> float:
    """What the next change costs: the dearest kind of live resize, or a restart; `estimate` where it was not measured.

    max over grow, shrink, move of the median of the last five; a recovery counts only where none of these is known.
    Where such changes have become restarts of late, x of the most that are tried: live + x (restart - live).
    """
    known = medians(costs)
    if not live:
        return known.get(RESTART, estimate)
    planned = [known[kind] for kind in ("grow", "shrink", "move") if kind in known]
    cost = max(planned) if planned else known.get("recover", estimate)
    return cost + failed * max(known.get(RESTART, cost) - cost, 0.0)
