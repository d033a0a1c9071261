"""Pollux (Qiao et al., OSDI'21): goodput and fairness, with a solver of our own.

Counts by a near-exact knapsack, then a placement that keeps unchanged jobs and clears room at the least cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pollux.core import BatchMode, Decision, JobView, Placement, Reason, Snapshot
from pollux.policies._board import Board, Shares
from pollux.policies._counts import Options, choose
from pollux.policies._objective import FloatArray, Objective

__all__ = ["Pollux"]

_NOTHING, _STAY, _FIRST = 0, 1, 2


class Pollux:
    """Maximise the power mean of restart-weighted speed-ups (see `_objective`).

    `fairness` is p. A job at most doubles the largest number of GPUs it has run with. With
    `avoid_interference` at most one distributed job uses a node, unless the node isolates traffic.
    """

    name = "pollux"
    needs: frozenset[str] = frozenset({"goodput"})
    batch: BatchMode = "adaptive"

    def __init__(
        self, fairness: float = -1.0, avoid_interference: bool = True, start_floor: float = 0.5,
        hysteresis: float = 0.0, powers: bool = True,
    ) -> None:
        self.fairness = fairness
        self.avoid_interference = avoid_interference
        self.start_floor = start_floor
        self.hysteresis = hysteresis
        self.powers = powers

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Counts, then places."""
        return _Solution(self, snapshot).decide()


class _Solution:
    def __init__(self, policy: Pollux, snapshot: Snapshot) -> None:
        self.policy, self.snapshot = policy, snapshot
        self.jobs: Sequence[JobView] = snapshot.jobs
        self.nodes = snapshot.cluster.nodes
        self.number = {node.id: n for n, node in enumerate(self.nodes)}
        self.objective = Objective(snapshot, self.jobs, policy.fairness, policy.start_floor)
        self.types = list(dict.fromkeys(node.gpu_type for node in self.nodes))
        self.board = Board(self.nodes, self.jobs, policy.avoid_interference)
        self.held: list[Shares] = [self._numbered(snapshot.placement(job.id)) for job in self.jobs]

    def _numbered(self, placement: Placement) -> Shares:
        return tuple((self.number[node], count) for node, count in placement.shares if node in self.number)

    def decide(self) -> Decision:
        if not self.jobs:
            return Decision({})
        self._build_options()
        chosen = choose(self.options)
        self._place(chosen)
        return self._decision()

    # Options

    def _shapes(self, gpu_type: str, most: int) -> list[tuple[int, int]]:
        """(nodes, GPUs) worth considering: powers of two within a node, then whole nodes."""
        sizes = [node.num_gpus for node in self.nodes if node.gpu_type == gpu_type and node.schedulable]
        largest = max(sizes, default=0)
        if not largest:
            return []
        if self.policy.powers:
            counts = {2**i for i in range(largest.bit_length()) if 2**i <= largest} | {largest}
        else:
            counts = set(range(1, largest + 1))
        counts |= {largest * q for q in range(2, sizes.count(largest) + 1)}
        counts |= {job.limits.min_gpus for job in self.jobs}
        return [(math.ceil(k / largest), k) for k in sorted(counts) if k <= min(most, sum(sizes))]

    def _build_options(self) -> None:
        jobs, objective = self.jobs, self.objective
        caps = [min(max(2 * job.largest_gpus, job.limits.min_gpus), job.limits.max_gpus) for job in jobs]
        columns = [(t, n, k) for t, gpu_type in enumerate(self.types) for n, k in self._shapes(gpu_type, max(caps))]
        self.columns = columns
        speedups = np.empty((len(jobs), len(columns)))
        for t, gpu_type in enumerate(self.types):
            mine = [i for i, column in enumerate(columns) if column[0] == t]
            speedups[:, mine] = objective.speedups([columns[i][1] for i in mine], [columns[i][2] for i in mine], gpu_type)
        self.stay_speedup = self._stay_speedups()
        factors = objective.restart_factors * (1.0 - self.policy.hysteresis * np.array([bool(held) for held in self.held]))
        self.move_utility = objective.utilities(speedups, factors[:, None])
        self.stay_utility = objective.utilities(self.stay_speedup)
        weights = objective.weights
        width = _FIRST + len(columns)
        cost = np.full((len(jobs), width), np.inf)
        gpus = np.zeros((len(jobs), width), dtype=np.int64)
        pool = np.zeros((len(jobs), width), dtype=np.int64)
        cost[:, _NOTHING] = weights * objective.costs(objective.utilities(np.zeros(len(jobs))))
        cost[:, _FIRST:] = weights[:, None] * objective.costs(self.move_utility)
        column_gpus = np.array([k for _, _, k in columns], dtype=np.int64)
        column_nodes = np.array([n for _, n, _ in columns], dtype=np.int64)
        gpus[:, _FIRST:] = column_gpus
        pool[:, _FIRST:] = np.array([t for t, _, _ in columns], dtype=np.int64)
        low = np.array([job.limits.min_gpus for job in jobs])[:, None]
        closed = (column_gpus < low) | (column_gpus > np.array(caps)[:, None]) | (speedups <= 0)
        most_nodes = np.array([job.limits.max_nodes or len(self.nodes) for job in jobs])
        closed |= column_nodes > most_nodes[:, None]
        cost[:, _FIRST:][closed] = np.inf
        for j, job in enumerate(jobs):
            held = self.held[j]
            if job.limits.gpu_types:
                wrong = [i for i, (t, _, _) in enumerate(columns) if self.types[t] not in job.limits.gpu_types]
                cost[j, [_FIRST + i for i in wrong]] = np.inf
            if held:
                gpus[j, _STAY] = sum(count for _, count in held)
                pool[j, _STAY] = self.types.index(self.nodes[held[0][0]].gpu_type)
                cost[j, _STAY] = weights[j] * objective.costs(self.stay_utility[j : j + 1])[0]
                if job.limits.pinned:
                    cost[j, :_STAY] = np.inf
                    cost[j, _FIRST:] = np.inf
                elif not job.limits.preemptible:
                    cost[j, _NOTHING] = np.inf
        quotas = [name for name, queue in self.snapshot.queues.items() if queue.gpu_quota is not None]
        queue = np.array([quotas.index(job.queue) if job.queue in quotas else -1 for job in jobs], dtype=np.int64)
        capacity = [sum(node.num_gpus for node in self.nodes if node.gpu_type == gpu_type) for gpu_type in self.types]
        limits = [self.snapshot.queues[name].gpu_quota for name in quotas]
        self.caps = caps
        self.options = Options(cost, gpus, pool, queue, np.array(capacity, dtype=np.int64), np.array(limits, dtype=np.int64))

    def _stay_speedups(self) -> FloatArray:
        """Speed-up of every job where it is now."""
        shapes = {}
        for held in self.held:
            if held:
                shapes.setdefault((self.nodes[held[0][0]].gpu_type, len(held), sum(c for _, c in held)), len(shapes))
        result = np.zeros(len(self.jobs))
        for gpu_type in self.types:
            mine = [shape for shape in shapes if shape[0] == gpu_type]
            table = self.objective.speedups([s[1] for s in mine], [s[2] for s in mine], gpu_type)
            column = {shape: i for i, shape in enumerate(mine)}
            for j, held in enumerate(self.held):
                if held and self.nodes[held[0][0]].gpu_type == gpu_type:
                    result[j] = table[j, column[gpu_type, len(held), sum(c for _, c in held)]]
        return result

    # Places

    def _place(self, chosen: np.ndarray) -> None:
        board, cost = self.board, self.options.cost
        stay = [j for j in range(len(self.jobs)) if chosen[j] == _STAY]
        for j in stay:
            board.put(j, self.held[j])
            moved = self.objective.utilities(self.stay_speedup[j : j + 1], self.objective.restart_factors[j])
            board.move_cost[j] = math.inf if self.jobs[j].limits.pinned else float(
                self.objective.weights[j] * self.objective.costs(moved)[0] - cost[j, _STAY]
            )
        movers = [j for j in range(len(self.jobs)) if chosen[j] >= _FIRST]
        movers.sort(key=lambda j: -self.options.gpus[j, chosen[j]])
        for j in movers:
            self._place_one(j, int(chosen[j]))
        for j in range(len(self.jobs)):
            if not board.shares[j]:
                self._place_waiting(j)

    def _place_one(self, j: int, option: int) -> None:
        board, cost = self.board, self.options.cost
        fallback = cost[j, _STAY] if self.held[j] and board.usable(j, self.held[j]) else cost[j, _NOTHING]
        tried = option
        while tried >= _FIRST:
            t, _, count = self.columns[tried - _FIRST]
            if cost[j, tried] < math.inf and board.place(j, count, self.types[t], self.held[j], fallback - cost[j, tried]) is not None:
                return
            if self.held[j] and board.usable(j, self.held[j]):
                board.put(j, self.held[j])
                return
            tried -= 1

    def _place_waiting(self, j: int) -> None:
        job = self.jobs[j]
        if self.held[j] and self.board.usable(j, self.held[j]):
            self.board.put(j, self.held[j])
            return
        for gpu_type in self.types:
            if (not job.limits.gpu_types or gpu_type in job.limits.gpu_types) and self.board.scatter(j, job.limits.min_gpus, gpu_type):
                return

    def _decision(self) -> Decision:
        allocation: dict[str, Placement] = {}
        reasons: dict[str, Reason] = {}
        for j, job in enumerate(self.jobs):
            shares = self.board.shares[j]
            if not shares:
                reasons[job.id] = Reason("waits-for-gpus", {"fair_gpus": self.objective.fair_gpus})
            elif shares == self.held[j]:
                allocation[job.id] = self.snapshot.placement(job.id)
            else:
                allocation[job.id] = Placement(tuple((self.nodes[n].id, count) for n, count in shares))
        return Decision(allocation, reasons=reasons)
