"""The measured pauses of a job's resizes, by kind, and an estimate of the next; pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

__all__ = ["LIVE_KINDS", "RESTART", "Costs", "likely_seconds", "medians", "with_pause"]

LIVE_KINDS = ("grow", "shrink", "move", "recover")
"""Live resizes: more replicas, fewer, the same number elsewhere, and fewer after a loss."""

RESTART = "restart"
"""A resize that ends all processes and starts new ones from the checkpoint."""

Costs = Mapping[str, tuple[float, ...]]
"""The last pauses of each kind, in seconds, oldest first. Replace it, do not change it."""

_KEPT = 5


def with_pause(costs: Costs, kind: str, seconds: float) -> Costs:
    """The costs with one more pause; only the last five of each kind are kept."""
    return {**costs, kind: (*costs.get(kind, ()), seconds)[-_KEPT:]}


def medians(costs: Costs) -> dict[str, float]:
    """The median pause of each kind that was measured."""
    return {kind: statistics.median(pauses) for kind, pauses in costs.items() if pauses}


def likely_seconds(costs: Costs, live: bool, estimate: float, failed: float = 0.0) -> float:
    """The expected pause of the next resize: of the most expensive live kind, or of a restart; else `estimate`.

    The maximum over grow, shrink and move of the median of the last five; a recovery counts only if none of them was
    measured. `failed` is the share x of failed live resizes, each of which costs a restart: live + x (restart - live).
    """
    known = medians(costs)
    if not live:
        return known.get(RESTART, estimate)
    planned = [known[kind] for kind in ("grow", "shrink", "move") if kind in known]
    cost = max(planned) if planned else known.get("recover", estimate)
    return cost + failed * max(known.get(RESTART, cost) - cost, 0.0)
