"""What each job could be given: placements worth considering, their cost to the objective, and what is allowed."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pollux.core import JobView, Snapshot
from pollux.policies.packing.capacity import suits
from pollux.policies.packing.placement_board import Shares
from pollux.policies.search.knapsack import IntArray, Options
from pollux.policies.search.objective import FloatArray, Objective

__all__ = ["FIRST", "NOTHING", "STAY", "Shape", "Table", "node_sizes"]

NOTHING = 0
"""Column of the option to hold no GPU."""
STAY = 1
"""Column of the option to keep the placement."""
FIRST = 2
"""First column of the options with a new placement, one for each shape."""

Shape = tuple[int, int, int]
"""(type, nodes, GPUs) of a placement on as few nodes as possible."""

BoolArray = npt.NDArray[np.bool_]


@functools.cache
def node_sizes(largest: int) -> tuple[int, ...]:
    """Counts within a node that pack without waste: the divisors of the node's size.

    Any mixture of 1, 2, 4 and 8 fills nodes of 8; with 3, 5 and 6 among them some GPUs stay idle or many jobs
    have to move. Sizes with few divisors get both halves as well.
    """
    sizes = {k for k in range(1, largest + 1) if largest % k == 0}
    if len(sizes) < 4 and largest > 4:
        sizes |= {2, largest // 2, largest - largest // 2}
    return tuple(sorted(sizes))


class Table:
    """Costs of all options of all jobs; `options` is what the knapsack chooses from.

    Every count within a node has a column, since idle GPUs may be added to jobs afterwards; the knapsack sees
    only the counts of `node_sizes`, whole nodes, and the minimum of jobs that need another count.
    """

    def __init__(self, snapshot: Snapshot, objective: Objective, held: Sequence[Shares]) -> None:
        self.jobs, self.nodes, self.objective, self.held = snapshot.jobs, snapshot.cluster.nodes, objective, held
        self.snapshot = snapshot
        self.types = list(dict.fromkeys(node.gpu_type for node in self.nodes))
        self._kinds = {(n.gpu_type, n.num_gpus, n.num_cpus, n.memory_bytes) for n in self.nodes if n.schedulable}
        self._shares: dict[tuple[str, float, float], int] = {}
        self.caps = objective.caps()
        self.shapes: list[Shape] = []
        packs: list[bool] = []
        for t in range(len(self.types)):
            for shape, pack in self._shapes_of(t):
                self.shapes.append(shape)
                packs.append(pack)
        self.column = {(t, k): FIRST + i for i, (t, _, k) in enumerate(self.shapes)}
        self.gpus_of = np.array([k for _, _, k in self.shapes], dtype=np.int64)
        self.type_of = [self.types.index(node.gpu_type) for node in self.nodes]
        self.speedups = speedups = self._speedups()
        self.stay_speedups = self._stay_speedups()
        objective.prepare(self.stay_speedups)
        self.factors = objective.restart_factors
        self._may_stay = [self._allowed_to_stay(j) for j in range(len(self.jobs))]
        price = objective.weighted_costs
        self.nothing_cost = price(np.zeros(len(self.jobs)))
        self.stay_cost = price(self.stay_speedups)
        self.moved_cost = price(self.stay_speedups, moved=True)
        self.shape_cost = price(speedups, moved=True)
        self.shape_cost[self._forbidden(speedups)] = np.inf
        self.ending: set[int] = set()
        self._odd_costs: dict[Shape, FloatArray] = {}
        self.shape_cost[self._pointless(speedups)] = np.inf
        # These jobs do not change the objective, so they get no more than they need.
        least = np.array([job.limits.min_gpus for job in self.jobs], dtype=np.int64)
        self.shape_cost[objective.hopeless[:, None] & (self.gpus_of > least[:, None]) & self._has_least(least)] = np.inf
        self.options = self._options(np.array(packs, dtype=bool))

    def _shapes_of(self, t: int) -> list[tuple[Shape, bool]]:
        """Shapes of one GPU type, and whether the knapsack may choose them freely."""
        open_sizes = [node.num_gpus for node in self.nodes if node.gpu_type == self.types[t] and node.schedulable]
        largest = max(open_sizes, default=0)
        if not largest:
            return []
        most = min(int(self.caps.max(initial=0)), sum(open_sizes))
        totals = list(itertools.accumulate(sorted(open_sizes, reverse=True)))
        pack = {size for each in set(open_sizes) if each for size in node_sizes(each)}
        # Whole nodes: of one size, or the largest there are.
        pack |= {each * q for each in set(open_sizes) if each for q in range(2, open_sizes.count(each) + 1)}
        pack |= set(totals)
        counts = pack | set(range(1, largest)) | {job.limits.min_gpus for job in self.jobs}
        return [((t, bisect_left(totals, k) + 1, k), k in pack) for k in sorted(counts) if k <= most]

    def _speedups(self) -> FloatArray:
        table = np.zeros((len(self.jobs), len(self.shapes)))
        for t, gpu_type in enumerate(self.types):
            mine = [i for i, shape in enumerate(self.shapes) if shape[0] == t]
            if mine:
                nodes, gpus = [self.shapes[i][1] for i in mine], [self.shapes[i][2] for i in mine]
                table[:, mine] = self.objective.speedups(nodes, gpus, gpu_type)
        return table

    def _stay_speedups(self) -> FloatArray:
        """Speed-up of every job where it is now, 0 where it holds nothing."""
        result = np.zeros(len(self.jobs))
        groups = self._by_held_shape()
        known = {shape: i for i, shape in enumerate(self.shapes)}
        for t, gpu_type in enumerate(self.types):
            odd = [shape for shape in groups if shape[0] == t and shape not in known]
            table = self.objective.speedups([n for _, n, _ in odd], [k for _, _, k in odd], gpu_type)
            for column, shape in enumerate(odd):
                result[groups[shape]] = table[groups[shape], column]
        for shape, members in groups.items():
            if shape in known:
                result[members] = self.speedups[members, known[shape]]
        return result

    def _by_held_shape(self) -> dict[Shape, list[int]]:
        """The jobs that hold GPUs now, by shape."""
        groups: dict[Shape, list[int]] = {}
        for j, held in enumerate(self.held):
            if held:
                shape = self.type_of[held[0][0]], len(held), sum(count for _, count in held)
                groups.setdefault(shape, []).append(j)
        return groups

    def _forbidden(self, speedups: FloatArray) -> BoolArray:
        """Shapes that a job's limits, or its CPUs and memory on any node, rule out."""
        jobs = self.jobs
        low = np.array([job.limits.min_gpus for job in jobs], dtype=np.int64)[:, None]
        nodes = np.array([n for _, n, _ in self.shapes], dtype=np.int64)
        most_nodes = np.array([job.limits.max_nodes or len(self.nodes) for job in jobs], dtype=np.int64)[:, None]
        closed: BoolArray = (self.gpus_of < low) | (self.gpus_of > self.caps[:, None]) | (nodes > most_nodes)
        closed |= speedups <= 0.0
        for j, job in enumerate(jobs):
            if job.limits.gpu_types:
                closed[j] |= self._of_other_types(job)
            if job.limits.cpus_per_gpu or job.limits.memory_bytes_per_gpu:
                closed[j] |= self._beyond_cpus_and_memory(job)
        return closed

    def _of_other_types(self, job: JobView) -> BoolArray:
        taken = [job.limits.takes_type(gpu_type) for gpu_type in self.types]
        return np.array([not taken[t] for t, _, _ in self.shapes], dtype=bool)

    def _beyond_cpus_and_memory(self, job: JobView) -> BoolArray:
        largest = [self._largest_share(job, gpu_type) for gpu_type in self.types]
        return np.array([math.ceil(k / n) > largest[t] for t, n, k in self.shapes], dtype=bool)

    def _pointless(self, speedups: FloatArray) -> BoolArray:
        """Moves of a running job that end it no sooner: its pause is longer than the time that the new shape saves.

        A job that would be done before it is resized is not shrunk either. Nothing is ruled out for jobs that
        do not say how much they have left.
        """
        pointless: BoolArray = np.zeros(speedups.shape, dtype=bool)
        remaining = self.objective.remaining
        for j, job in enumerate(self.jobs):
            left, rate = remaining[j], self.stay_speedups[j] * self.objective.fair_goodputs[j]
            if left is None or not self._may_stay[j] or rate <= 0.0:
                continue
            seconds, cost = left / rate, job.resize_cost_seconds
            if seconds <= cost:
                self.ending.add(j)
                pointless[j] = True
            else:
                faster = speedups[j] > self.stay_speedups[j]
                after = cost + seconds * self.stay_speedups[j] / np.maximum(speedups[j], 1e-12)
                pointless[j] = faster & (after >= seconds)
        return pointless

    def _has_least(self, least: IntArray) -> BoolArray:
        """Jobs that can have exactly their minimum, as a column."""
        exact: BoolArray = (np.isfinite(self.shape_cost) & (self.gpus_of == least[:, None])).any(axis=1, keepdims=True)
        return exact

    def _largest_share(self, job: JobView, gpu_type: str) -> int:
        """Most GPUs that a job can have on one empty node of a type, by CPUs and memory."""
        limits = job.limits
        key = gpu_type, limits.cpus_per_gpu, limits.memory_bytes_per_gpu
        if key not in self._shares:
            self._shares[key] = max(
                (
                    int(min([gpus] + [have // each for have, each in ((cpus, key[1]), (memory, key[2])) if each]))
                    for kind, gpus, cpus, memory in self._kinds
                    if kind == gpu_type
                ),
                default=0,
            )
        return self._shares[key]

    def packs(self, held: Shares) -> bool:
        """Whether a placement leaves useful counts of GPUs on its nodes."""
        return all(count in node_sizes(self.nodes[n].num_gpus) for n, count in held)

    def cost_on(self, j: int, shape: Shape) -> float:
        """The cost of a job that moves to a shape, even one that is not an option."""
        column = self.column.get((shape[0], shape[2]))
        if column is not None and self.shapes[column - FIRST] == shape:
            return float(self.shape_cost[j, column - FIRST])
        if shape not in self._odd_costs:
            speedups = self.objective.speedups([shape[1]], [shape[2]], self.types[shape[0]])[:, 0]
            self._odd_costs[shape] = self.objective.weighted_costs(speedups, moved=True)
        return float(self._odd_costs[shape][j])

    def may_stay(self, j: int) -> bool:
        """Whether a job's limits still allow its placement."""
        return self._may_stay[j]

    def _allowed_to_stay(self, j: int) -> bool:
        held, limits = self.held[j], self.jobs[j].limits
        if not held or limits.pinned:
            return bool(held)
        count = sum(gpus for _, gpus in held)
        types = {self.nodes[n].gpu_type for n, _ in held}
        all_there = len(held) == self.snapshot.placement(self.jobs[j].id).num_nodes
        return all_there and suits(limits, count, len(held), types)

    def _options(self, packs: BoolArray) -> Options:
        jobs, width = self.jobs, FIRST + len(self.shapes)
        cost = np.full((len(jobs), width), np.inf)
        gpus = np.zeros((len(jobs), width), dtype=np.int64)
        pool = np.zeros((len(jobs), width), dtype=np.int64)
        cost[:, NOTHING] = self.nothing_cost
        cost[:, FIRST:] = self.shape_cost
        offered = np.isfinite(self.shape_cost)
        least = self.gpus_of == np.array([job.limits.min_gpus for job in jobs], dtype=np.int64)[:, None]
        some_pack = (offered & packs).any(axis=1, keepdims=True)
        cost[:, FIRST:][~packs & ~least & some_pack] = np.inf
        gpus[:, FIRST:] = self.gpus_of
        pool[:, FIRST:] = np.array([t for t, _, _ in self.shapes], dtype=np.int64)
        for j in range(len(jobs)):
            if self.held[j]:
                self._offer_stay(j, cost[j], gpus[j], pool[j])
        quotas = {n: q.gpu_quota for n, q in self.snapshot.queues.items() if q.gpu_quota is not None}
        index = {name: i for i, name in enumerate(quotas)}
        capacity = [
            sum(n.num_gpus for n in self.nodes if n.gpu_type == gpu_type and n.schedulable) for gpu_type in self.types
        ]
        return Options(
            cost, gpus, pool, np.array([index.get(job.queue, -1) for job in jobs], dtype=np.int64),
            np.array(capacity, dtype=np.int64), np.array(list(quotas.values()), dtype=np.int64),
        )  # fmt: skip

    def _offer_stay(self, j: int, cost: FloatArray, gpus: IntArray, pool: IntArray) -> None:
        """Write what it costs a running job to stay, and close the options that it may not take."""
        limits = self.jobs[j].limits
        if self.may_stay(j):
            cost[STAY] = self.stay_cost[j]
            # No other job can use GPUs on closed nodes, so staying there takes nothing from the pool.
            gpus[STAY] = sum(count for n, count in self.held[j] if self.nodes[n].schedulable)
            pool[STAY] = self.type_of[self.held[j][0][0]]
        if limits.pinned:
            cost[NOTHING] = cost[FIRST:] = np.inf
        elif not limits.preemptible:
            # It may always stay, but if its limits forbid that, any other option is better.
            cost[NOTHING] = np.inf
            if not self.may_stay(j):
                cost[STAY] = 2.0 * abs(self.nothing_cost[j])
