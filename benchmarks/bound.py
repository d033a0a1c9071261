"""How good a decision is: its fitness over an upper bound that no placement can beat.

The bound is the best assignment of GPU counts when GPUs are only counted: every count from 1 to a job's maximum on
as few nodes as it needs, moves weighed by the restart factor, staying free of it. Up to `EXACT_CELLS` it is an exact
knapsack; beyond, the Lagrangian bound, which is never below the exact one.
"""

from __future__ import annotations

import math

import numpy as np

from pollux.core import Decision, Snapshot
from pollux.policies.search.objective import Objective

EXACT_CELLS = 60_000_000


class Judge:
    """Fitness, bound and quality of decisions on one snapshot, by the published objective."""

    def __init__(self, snapshot: Snapshot, fairness: float = -1.0, start_floor: float = 0.0) -> None:
        self.snapshot = snapshot
        self.objective = Objective(snapshot, snapshot.jobs, fairness, start_floor)
        self.largest = max(node.num_gpus for node in snapshot.cluster.nodes)

    def utilities(self, decision: Decision) -> np.ndarray:
        """`v` of every job under a decision."""
        jobs = self.snapshot.jobs
        new = [decision.allocation.get(job.id) for job in jobs]
        speedups = self._speedups([(p.num_nodes, p.num_gpus) if p else None for p in new])
        moved = [p is not None and p != self.snapshot.placement(job.id) for job, p in zip(jobs, new, strict=True)]
        return self.objective.utilities(speedups, np.where(moved, self.objective.restart_factors, 1.0))

    def fitness(self, decision: Decision) -> float:
        """The power mean of the utilities."""
        return self.objective.fitness(self.utilities(decision))

    def _speedups(self, shapes: list[tuple[int, int] | None]) -> np.ndarray:
        distinct = sorted({shape for shape in shapes if shape})
        if not distinct:
            return np.zeros(len(shapes))
        table = self.objective.speedups([n for n, _ in distinct], [k for _, k in distinct])
        column = {shape: i for i, shape in enumerate(distinct)}
        return np.array([table[j, column[shape]] if shape else 0.0 for j, shape in enumerate(shapes)])

    def bound(self) -> float:
        """The upper bound on fitness."""
        jobs, objective = self.snapshot.jobs, self.objective
        caps = np.array([min(max(2 * j.largest_gpus, j.limits.min_gpus), j.limits.max_gpus) for j in jobs])
        counts = np.arange(1, caps.max() + 1)
        moves = objective.utilities(
            objective.speedups([math.ceil(k / self.largest) for k in counts], counts.tolist()),
            objective.restart_factors[:, None],
        )
        current = [self.snapshot.placement(job.id) for job in jobs]
        stays = objective.utilities(self._speedups([(p.num_nodes, p.num_gpus) if p else None for p in current]))
        weights = objective.weights[:, None]
        cost = np.full((len(jobs), 2 + len(counts)), np.inf)
        cost[:, :1] = weights * objective.costs(objective.utilities(np.zeros((len(jobs), 1))))
        cost[:, 1] = np.where([bool(p) for p in current], objective.weights * objective.costs(stays), np.inf)
        least = np.array([job.limits.min_gpus for job in jobs])[:, None]
        open_counts = (counts >= least) & (counts <= caps[:, None])
        cost[:, 2:] = np.where(open_counts, weights * objective.costs(moves), np.inf)
        gpus = np.zeros_like(cost, dtype=np.int64)
        gpus[:, 1] = [p.num_gpus for p in current]
        gpus[:, 2:] = counts
        capacity = self.snapshot.cluster.num_gpus
        total = _exact(cost, gpus, capacity) if cost.size * capacity <= EXACT_CELLS else _dual(cost, gpus, capacity)
        mean, p = total / float(objective.weights.sum()), objective.fairness
        return math.exp(-mean) if p == 0 else abs(mean) ** (1 / p)

    def quality(self, decision: Decision) -> float:
        """Fitness over the bound."""
        return self.fitness(decision) / self.bound()

    def idle_usable_gpus(self, decision: Decision) -> int:
        """Idle GPUs that waiting jobs could run on, counted by what they need at least."""
        used = sum(placement.num_gpus for placement in decision.allocation.values())
        idle, usable = self.snapshot.cluster.num_gpus - used, 0
        for job in sorted(self.snapshot.jobs, key=lambda job: job.limits.min_gpus):
            if not decision.allocation.get(job.id) and job.limits.min_gpus <= idle - usable:
                usable += job.limits.min_gpus
        return usable


def _exact(cost: np.ndarray, gpus: np.ndarray, capacity: int) -> float:
    best = np.zeros(capacity + 1)
    grid = np.arange(capacity + 1)
    for j in range(len(cost)):
        open_options = np.isfinite(cost[j])
        left = grid[None, :] - gpus[j, open_options][:, None]
        best = (np.where(left >= 0, best[np.maximum(left, 0)], np.inf) + cost[j, open_options][:, None]).min(axis=0)
    return float(best[capacity])


def _dual(cost: np.ndarray, gpus: np.ndarray, capacity: int) -> float:
    """max over λ ≥ 0 of Σ min(cost + λ·gpus) - λ·capacity, which is concave in λ."""

    def value(price: float) -> float:
        return float((cost + price * gpus).min(axis=1).sum() - price * capacity)

    low, high = 0.0, float(np.ptp(cost[np.isfinite(cost)])) + 1.0
    golden = (math.sqrt(5) - 1) / 2
    points = [high - golden * (high - low), low + golden * (high - low)]
    values = [value(point) for point in points]
    for _ in range(80):
        if values[0] >= values[1]:
            high, points[1], values[1] = points[1], points[0], values[0]
            points[0] = high - golden * (high - low)
            values[0] = value(points[0])
        else:
            low, points[0], values[0] = points[0], points[1], values[1]
            points[1] = low + golden * (high - low)
            values[1] = value(points[1])
    return max(values[0], values[1], value(0.0))
