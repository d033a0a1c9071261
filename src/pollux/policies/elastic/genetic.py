"""Pollux (Qiao et al., OSDI'21) with its published genetic search; the reference for `pollux`.

The evolution itself is in `search.nsga2`; this module has its inputs, its objectives and the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pollux.core import (
    NOWHERE,
    BatchMode,
    Decision,
    InvalidInput,
    JobLimits,
    JobView,
    Placement,
    Reason,
    Snapshot,
    check,
)
from pollux.policies.packing.capacity import Room
from pollux.policies.packing.empty_cluster import Whole
from pollux.policies.reasons import Holders, change_code
from pollux.policies.search.nsga2 import Found, Space, search
from pollux.policies.search.objective import Objective

__all__ = ["PolluxGenetic"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]

# The published simulation has no measurements beyond 16 nodes.
_MAX_NODES = 16
# More GPUs than any cluster has; a thousand times this is still a 32-bit number.
_MOST = 2**20
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class _Front:
    """What one decision leaves to the next: its non-dominated matrices [members, jobs, nodes], with their ids."""

    jobs: tuple[str, ...]
    nodes: tuple[str, ...]
    states: IntArray

    def adapted(self, jobs: Sequence[str], nodes: Sequence[str]) -> IntArray:
        """The matrices for other jobs and nodes: zero for new ones."""
        rows = {job_id: j for j, job_id in enumerate(self.jobs)}
        columns = {node_id: n for n, node_id in enumerate(self.nodes)}
        # One more row and column of zeros, at -1.
        padded = np.pad(self.states, ((0, 0), (0, 1), (0, 1)))
        found = padded[:, [rows.get(job_id, -1) for job_id in jobs]]
        return found[:, :, [columns.get(node_id, -1) for node_id in nodes]]


class PolluxGenetic:
    """NSGA-II over GPUs by job and node, as published: 100 matrices, 100 generations (paper §4.2).

    Two objectives: the power mean of `Objective`, and the cluster's utility, i.e. the mean speed-up per
    replica, weighted by shares of all GPUs. The best matrix by the first is taken. A decision starts from the
    non-dominated matrices of the last one. A job may hold at most twice the GPUs that it ever ran with; with
    `avoid_interference` at most one distributed job uses a node, unless the node isolates traffic.
    """

    name = "pollux-genetic"
    needs: frozenset[str] = frozenset({"goodput"})
    batch: BatchMode = "adaptive"

    def __init__(
        self,
        fairness: float = -1.0,
        avoid_interference: bool = True,
        population: int = 100,
        generations: int = 100,
    ) -> None:
        if population < 1:
            raise InvalidInput(f"population is {population}; give at least 1")
        if generations < 0:
            raise InvalidInput(f"generations is {generations}; give 0 or more")
        self.fairness = fairness
        self.avoid_interference = avoid_interference
        self.population = population
        self.generations = generations

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Evolve allocations and take the best."""
        jobs = sorted(snapshot.jobs, key=lambda job: _precedence(snapshot, job))
        if not jobs or not snapshot.cluster.num_gpus:
            return _keep_what_runs(snapshot, jobs)
        space = _space(snapshot, jobs, self.avoid_interference)
        objective = Objective(snapshot, jobs, self.fairness, start_floor=0.0)
        worth = _Worth(snapshot, jobs, objective, space)
        rng = np.random.default_rng([snapshot.seed % 2**64, snapshot.revision % 2**64])
        start = _start(snapshot, jobs, space.current)
        found = search(space, worth, start, self.population, self.generations, rng)
        allocation = _placements(snapshot, jobs, space, found.states[found.best])
        decision = Decision(
            allocation, reasons=_reasons(snapshot, jobs, allocation, objective), memory=_remember(snapshot, jobs, found)
        )
        return decision if not check(snapshot, decision) else _keep_what_runs(snapshot, jobs)


def _precedence(snapshot: Snapshot, job: JobView) -> tuple[int, float, float]:
    """Jobs that stay first, then those that may not be stopped, then by attained service and submission."""
    rank = 2
    if snapshot.placement(job.id) and (job.limits.pinned or not job.limits.preemptible):
        # Rows have no column for a node that is gone; the job may still stay as it is.
        rank = 0 if job.limits.pinned or not _is_known(snapshot, job) else 1
    return rank, job.attained_gpu_seconds, job.submitted_at


def _is_known(snapshot: Snapshot, job: JobView) -> bool:
    """Whether all nodes of a job's placement are there."""
    return all(node_id in snapshot.cluster.by_id for node_id, _ in snapshot.placement(job.id).shares)


def _space(snapshot: Snapshot, jobs: Sequence[JobView], avoid_interference: bool) -> Space:
    nodes, current = snapshot.cluster.nodes, _current(snapshot, jobs)
    ranks = [_precedence(snapshot, job)[0] for job in jobs]
    held = [snapshot.placement(job.id).num_gpus for job in jobs]
    queue, quota = _quotas(snapshot, jobs)
    needs = np.array([(job.limits.cpus_per_gpu, job.limits.memory_bytes_per_gpu) for job in jobs])
    stock = np.array([(node.num_cpus, node.memory_bytes) for node in nodes]).reshape(-1, 2)
    scarce = needs.any(axis=0) & np.isfinite(stock).any(axis=0)
    types = [node.gpu_type for node in nodes]
    numbers = list(dict.fromkeys(types))
    return Space(
        current=current,
        lost=_whole(held) - current.sum(axis=1, dtype=np.int32),
        most=_most(snapshot, jobs, current, needs, stock),
        gpus=_whole(node.num_gpus for node in nodes),
        node_type=_whole(map(numbers.index, types)),
        shared=np.array([avoid_interference and not node.isolated_network for node in nodes], dtype=bool),
        **_bounds([job.limits for job in jobs], len(numbers)),
        max_gpus=_whole(map(_cap, jobs, held)),
        needs=needs[:, scarce],
        stock=stock[:, scarce],
        queue=queue,
        quota=quota,
        num_pinned=ranks.count(0),
        num_kept=ranks.count(1),
    )


def _bounds(limits: Sequence[JobLimits], num_types: int) -> dict[str, Any]:
    """The limits of jobs on GPUs, nodes and types."""
    return {
        "min_gpus": _whole(limit.min_gpus for limit in limits),
        "max_nodes": _whole(limit.max_nodes or max(_MAX_NODES, limit.min_gpus) for limit in limits),
        "one_type": np.array([not limit.mixed_types and num_types > 1 for limit in limits]),
    }


def _current(snapshot: Snapshot, jobs: Sequence[JobView]) -> IntArray:
    """GPUs that each job holds on each node that is still there."""
    number = {node.id: n for n, node in enumerate(snapshot.cluster.nodes)}
    current: IntArray = np.zeros((len(jobs), len(number)), dtype=np.int32)
    for j, job in enumerate(jobs):
        for node_id, count in snapshot.placement(job.id).shares:
            if node_id in number:
                current[j, number[node_id]] = count
    return current


def _cap(job: JobView, held: int) -> int:
    """Most GPUs that a job may have: twice the most it has run with, within its limits."""
    return min(max(2 * max(job.largest_gpus, held), job.limits.min_gpus, 1), job.limits.max_gpus)


def _quotas(snapshot: Snapshot, jobs: Sequence[JobView]) -> tuple[IntArray, IntArray]:
    """The number of each job's queue, -1 without a quota, and the quotas by that number."""
    quotas = {name: queue.gpu_quota for name, queue in snapshot.queues.items() if queue.gpu_quota is not None}
    numbers = {name: q for q, name in enumerate(quotas)}
    return _whole(numbers.get(job.queue, -1) for job in jobs), _whole(quotas.values())


def _whole(values: Iterable[int]) -> IntArray:
    return np.array([min(value, _MOST) for value in values], dtype=np.int32)


def _most(
    snapshot: Snapshot, jobs: Sequence[JobView], current: IntArray, needs: FloatArray, stock: FloatArray
) -> IntArray:
    """GPUs that each node may give to each job if no other is there; if it is closed, those that the job has."""
    most = np.tile(_whole(node.num_gpus for node in snapshot.cluster.nodes), (len(jobs), 1)).astype(float)
    for r in range(needs.shape[1]):
        some = needs[:, r] > 0
        most[some] = np.minimum(most[some], np.floor(stock[:, r] / needs[some, r, None] + _SLACK))
    for n, node in enumerate(snapshot.cluster.nodes):
        if not node.schedulable:
            most[:, n] = np.minimum(most[:, n], current[:, n])
    for j, job in enumerate(jobs):
        if job.limits.pinned and snapshot.placement(job.id):
            most[j] = 0
        elif job.limits.gpu_types:
            most[j, [not job.limits.takes_type(node.gpu_type) for node in snapshot.cluster.nodes]] = 0
    return most.astype(np.int32)


class _Worth:
    """The two objectives of matrices, from tables of speed-ups by job, nodes and GPUs."""

    def __init__(self, snapshot: Snapshot, jobs: Sequence[JobView], objective: Objective, space: Space) -> None:
        self.objective, self.current, self.node_type = objective, space.current, space.node_type
        self.cluster_gpus = int(space.gpus.sum())
        # A job whose node is gone does not stay, whatever its row says.
        self.moves = np.array([not _is_known(snapshot, job) for job in jobs])
        self.moves[: space.num_pinned] = False
        gpus = max(min(int(space.max_gpus.max()), int(space.gpus.sum())), int(space.current.sum(axis=1).max()))
        spanned = int(np.count_nonzero(space.current, axis=1).max())
        nodes = max(min(int(space.max_nodes.max()), len(space.gpus), gpus), spanned)
        pairs = [(n, k) for n in range(1, nodes + 1) for k in range(n, gpus + 1)]
        # A node holds at most this; a present placement may exceed its node, if the node has shrunk.
        largest = max(int(space.gpus.max()), int(space.current.max()))
        num_nodes, num_gpus = zip(*((n, k) for n, k in pairs if k <= n * largest), strict=True)
        types = dict.fromkeys(node.gpu_type for node in snapshot.cluster.nodes)
        self.tables = np.zeros((len(types), len(jobs), nodes + 1, gpus + 1))
        for table, gpu_type in zip(self.tables, types, strict=True):
            table[:, num_nodes, num_gpus] = objective.speedups(num_nodes, num_gpus, gpu_type)

    def speedups(self, states: IntArray, num_gpus: IntArray) -> FloatArray:
        """Speed-up of every job, shape [population, jobs]; on several GPU types, that on the slowest."""
        present = states > 0
        num_nodes = np.einsum("pjn->pj", present, dtype=np.int32)
        members = np.arange(states.shape[1])
        if len(self.tables) == 1:
            single: FloatArray = self.tables[0][members, num_nodes, num_gpus]
            return single
        slowest = np.full(num_gpus.shape, np.inf)
        for t, table in enumerate(self.tables):
            used = present[:, :, self.node_type == t].any(axis=2)
            np.minimum(slowest, table[members, num_nodes, num_gpus], out=slowest, where=used)
        return np.where(num_gpus > 0, slowest, 0.0)

    def __call__(self, states: IntArray) -> FloatArray:
        """The power mean of utilities, and the cluster's utility; shape [population, 2]."""
        objective = self.objective
        num_gpus = np.einsum("pjn->pj", states)
        speedups = self.speedups(states, num_gpus)
        changed = (states != self.current).any(axis=2) | self.moves
        utilities = objective.utilities(speedups, np.where(changed, objective.restart_factors, 1.0))
        mean = objective.costs(utilities) @ objective.weights / objective.weights.sum()
        p = objective.fairness
        fitness = np.exp(-mean) if p == 0 else np.abs(mean) ** (1.0 / p)
        # Speed-up per replica, weighted by replicas: the weights are shares of the whole cluster, used or not.
        return np.column_stack((fitness, speedups.sum(axis=1) / self.cluster_gpus))


def _start(snapshot: Snapshot, jobs: Sequence[JobView], current: IntArray) -> IntArray:
    """The current allocation, and what the last decision left."""
    now = current[None]
    front = snapshot.memory
    if not isinstance(front, _Front) or front.states.shape[1:] != (len(front.jobs), len(front.nodes)):
        return now
    nodes = [node.id for node in snapshot.cluster.nodes]
    return np.concatenate((now, front.adapted([job.id for job in jobs], nodes).clip(0, _MOST)))


def _remember(snapshot: Snapshot, jobs: Sequence[JobView], found: Found) -> _Front:
    states = found.states[found.ranks == 0]
    states.setflags(write=False)
    return _Front(tuple(job.id for job in jobs), tuple(node.id for node in snapshot.cluster.nodes), states)


def _placements(snapshot: Snapshot, jobs: Sequence[JobView], space: Space, chosen: IntArray) -> dict[str, Placement]:
    """Rows as placements, in the cluster's order of nodes; an unchanged row is the placement as it is."""
    names = [node.id for node in snapshot.cluster.nodes]
    allocation: dict[str, Placement] = {}
    for j, (job, before, after) in enumerate(zip(jobs, space.current, chosen, strict=True)):
        placement = snapshot.placement(job.id)
        stays = (before == after).all() and (j < space.num_pinned or _is_known(snapshot, job))
        if not (placement and stays):
            placement = Placement(tuple((names[n], int(after[n])) for n in np.flatnonzero(after)))
        if placement:
            allocation[job.id] = placement
    return allocation


def _reasons(
    snapshot: Snapshot, jobs: Sequence[JobView], allocation: Mapping[str, Placement], objective: Objective
) -> dict[str, Reason]:
    """Reasons of jobs whose placement changes, or that wait."""
    holders, whole, reasons = Holders(snapshot, allocation), Whole(snapshot.cluster), {}
    free = snapshot.cluster.num_gpus - sum(placement.num_gpus for placement in allocation.values())
    for job in jobs:
        old, new = snapshot.placement(job.id), allocation.get(job.id, NOWHERE)
        if new and new == old:
            continue
        numbers = {
            "gpus_before": float(old.num_gpus),
            "gpus_after": float(new.num_gpus),
            "fair_gpus": float(objective.fair_gpus),
            "min_gpus": float(job.limits.min_gpus),
            "max_gpus": float(job.limits.max_gpus),
        }
        if not new:
            lacks = whole.lacks(job.limits, snapshot.queues.get(job.queue))
            if lacks and not old:
                reasons[job.id] = Reason("fits-nowhere", lacks)
                continue
            numbers |= {"gpus": float(job.limits.min_gpus), "free_gpus": float(max(free, 0))}
        reasons[job.id] = holders.blamed(job, Reason(change_code(old.num_gpus, new.num_gpus), numbers))
    return reasons


def _keep_what_runs(snapshot: Snapshot, jobs: Sequence[JobView]) -> Decision:
    """All jobs stay that may: a legal answer, if the search ever gives an illegal one."""
    room = Room(snapshot)
    allocation: dict[str, Placement] = {}
    for job in jobs:
        placement = snapshot.placement(job.id)
        immovable = job.limits.pinned or not job.limits.preemptible
        if placement and (immovable or room.can_keep(job, placement)):
            allocation[job.id] = placement
            room.take(job, placement)
    return Decision(allocation)
