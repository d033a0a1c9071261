"""The published cluster objective: speed-ups, restart factors and the power mean that weighs them.

Shared by the solver and by the genetic reference, so that both are judged by the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pollux.core import GoodputFunction, InvalidInput, JobView, Snapshot
from pollux.goodput import GoodputModel, goodput_tables

__all__ = ["Objective", "check_fairness", "gpu_cap", "restart_factors"]

FloatArray = npt.NDArray[np.float64]

# Of Eq. (G25): keeps a waiting job's utility above zero, so that the power mean stays finite for p < 0 (published).
_UTILITY_FLOOR = 1e-3

_MOST_FAIRNESS = 50.0


def check_fairness(fairness: float) -> None:
    """Refuse powers whose results no floating-point number holds."""
    if not (math.isfinite(fairness) and abs(fairness) <= _MOST_FAIRNESS):
        limit = f"from -{_MOST_FAIRNESS:g} to {_MOST_FAIRNESS:g}"
        raise InvalidInput(f"fairness is {fairness}; give a power {limit}, -1 is the published one")


class Objective:
    """Maximise `(Σ w v^p / Σ w)^(1/p)`, Eq. (G27), with `v = speed-up · ρ · nodes/GPUs + 0.001`, Eq. (G25).

    Weights are those of Eq. (G26). The search keeps the constraints, among them the doubling rule, Eq. (G29), and
    the interference rule, Eq. (G30). `start_floor` is the least ρ of a job that holds nothing: by the
    published formula a job of age 0 would be worth nothing to start. With `corrected`, corrections of fits by
    measurements count; as published, they do not.
    """

    corrected = False

    def __init__(
        self, snapshot: Snapshot, jobs: Sequence[JobView], fairness: float = -1.0, start_floor: float = 0.0
    ) -> None:
        check_fairness(fairness)
        self.jobs = jobs
        self.fairness = fairness
        nodes = [node for node in snapshot.cluster.nodes if node.num_gpus]
        self.scale = len(nodes) / max(sum(node.num_gpus for node in nodes), 1)
        usable = _usable_gpus(snapshot)
        self.num_gpus = max(sum(usable.values()), 1)
        self.fair_gpus = max(math.ceil(self.num_gpus / max(len(jobs), 1)), 1)
        self.weights = np.array([snapshot.weight(job) for job in jobs], dtype=float)
        self.restart_factors = restart_factors(snapshot, jobs)
        # Jobs that hold nothing and would, as published, add nothing with any GPUs.
        holds = np.array([bool(snapshot.placement(job.id)) for job in jobs], dtype=bool)
        self.hopeless = ~holds & (self.restart_factors == 0.0)
        np.maximum(self.restart_factors, start_floor, out=self.restart_factors, where=~holds)
        self._gpu_types: dict[str, int] = {}
        for node in nodes:
            self._gpu_types[node.gpu_type] = self._gpu_types.get(node.gpu_type, 0) + usable[node.id]
        self._modelled = [i for i, job in enumerate(jobs) if isinstance(job.goodput, GoodputModel)]
        self._models = [job.goodput for job in jobs if isinstance(job.goodput, GoodputModel)]
        self._fair_goodputs: FloatArray | None = None

    @property
    def fair_goodputs(self) -> FloatArray:
        """Goodput at `ceil(GPUs/jobs)` replicas modelled on one node, Eq. (G23), averaged over GPUs by type."""
        if self._fair_goodputs is None:
            base = np.zeros(len(self.jobs))
            total = sum(self._gpu_types.values()) or 1
            for gpu_type, gpus in self._gpu_types.items():
                base += gpus / total * self._goodputs([1], [self.fair_gpus], gpu_type)[:, 0]
            self._fair_goodputs = self._repaired(base)
        return self._fair_goodputs

    def _repaired(self, base: FloatArray) -> FloatArray:
        """The same, where the fair share is more than a job's batch limits allow."""
        for i in np.flatnonzero(base <= 0.0).tolist():
            function = self.jobs[i].goodput
            if function is None:
                base[i] = self.fair_gpus
                continue
            # Compare with the most that it can use instead.
            fair = self.fair_gpus
            while fair > 1 and base[i] <= 0.0:
                fair = min(fair // 2, function.max_gpus) if isinstance(function, GoodputModel) else fair // 2
                base[i] = self._on_one_node(function, max(fair, 1))
            if base[i] <= 0.0:
                base[i] = self._on_fewest(self.jobs[i], function)
        return base

    def _on_fewest(self, job: JobView, function: GoodputFunction) -> float:
        """A job's goodput on the fewest GPUs that it can run on; 0 where it can run on none."""
        fewest = function.min_gpus if isinstance(function, GoodputModel) else 1
        counts = range(max(fewest, job.limits.min_gpus), min(job.limits.max_gpus, self.num_gpus) + 1)
        return next((found for k in counts if (found := self._on_one_node(function, k)) > 0.0), 0.0)

    def _on_one_node(self, function: GoodputFunction, num_gpus: int) -> float:
        """A job's goodput on so many GPUs of one node, of the best type."""
        if isinstance(function, GoodputModel) and not self.corrected:
            function = function.as_fitted
        found = (function.goodput(1, num_gpus, gpu_type) for gpu_type in self._gpu_types)
        return max((rate for rate in found if math.isfinite(rate)), default=0.0)

    def _goodputs(self, num_nodes: Sequence[int], num_gpus: Sequence[int], gpu_type: str) -> FloatArray:
        """Goodput of every job on every placement; the number of GPUs for one never measured; 0 if it is no number."""
        table = np.zeros((len(self.jobs), len(num_gpus)))
        if self._models:
            places = np.asarray(num_nodes), np.asarray(num_gpus)
            rows = goodput_tables(self._models, *places, gpu_type, corrected=self.corrected)
            table[self._modelled] = rows
        if len(self._models) < len(self.jobs):
            for i, job in enumerate(self.jobs):
                if job.goodput is None:
                    table[i] = num_gpus
                elif not isinstance(job.goodput, GoodputModel):
                    table[i] = [job.goodput.goodput(n, k, gpu_type) for n, k in zip(num_nodes, num_gpus, strict=True)]
        table[~np.isfinite(table)] = 0.0
        return table

    def speedups(self, num_nodes: Sequence[int], num_gpus: Sequence[int], gpu_type: str = "") -> FloatArray:
        """`goodput / goodput(fair share)`, Eq. (G23), of every job on every placement, shape [jobs, placements]."""
        if not len(num_gpus):
            return np.zeros((len(self.jobs), 0))
        if self._fair_goodputs is None and set(self._gpu_types) == {gpu_type}:
            # One table for both, since a small table is mostly overhead.
            table = self._goodputs([*num_nodes, 1], [*num_gpus, self.fair_gpus], gpu_type)
            self._fair_goodputs = self._repaired(table[:, -1].copy())
            table = table[:, :-1]
        else:
            table = self._goodputs(num_nodes, num_gpus, gpu_type)
        return np.divide(
            table, self.fair_goodputs[:, None], out=np.zeros_like(table), where=self.fair_goodputs[:, None] > 0
        )

    def utilities(self, speedups: FloatArray, factors: FloatArray | float = 1.0) -> FloatArray:
        """`v` of speed-ups under restart factors, Eq. (G25)."""
        result: FloatArray = speedups * factors * self.scale + _UTILITY_FLOOR
        return result

    def costs(self, utilities: FloatArray) -> FloatArray:
        """What a job adds to the sum to be minimised, Eq. (G28), without its weight: `v^p`, `-log v` or `-v^p`."""
        p = self.fairness
        if p == 0:
            return -np.log(utilities)
        if p == -1:
            return 1.0 / utilities
        powers: FloatArray = utilities**p
        return powers if p < 0 else -powers

    def prepare(self, held_speedups: FloatArray) -> None:
        """Note every job's speed-up where it is now, before any cost is computed."""

    @property
    def remaining(self) -> Sequence[float | None]:
        """Useful samples that each job has left."""
        return [job.remaining for job in self.jobs]

    def numbers(self, j: int) -> Mapping[str, float]:
        """Numbers that this objective adds to the reason of a job."""
        return {}

    def caps(self) -> npt.NDArray[np.int64]:
        """Most GPUs each job may have now: it at most doubles the most it has run with, Eq. (G29)."""
        return np.array([gpu_cap(job) for job in self.jobs], dtype=np.int64)

    def weighted_costs(self, speedups: FloatArray, moved: bool = False) -> FloatArray:
        """The terms of all jobs in the sum to be minimised, for speed-ups of shape [jobs] or [jobs, placements]."""
        weights, factors = self.weights, self.restart_factors if moved else np.ones(len(self.jobs))
        if speedups.ndim == 2:
            weights, factors = weights[:, None], factors[:, None]
        return weights * self.costs(self.utilities(speedups, factors))

    def fitness(self, utilities: FloatArray) -> float:
        """The weighted power mean of the utilities of all jobs, Eq. (G27)."""
        if not len(utilities):
            return 0.0
        total = float(self.weights.sum())
        mean = float((self.weights * self.costs(utilities)).sum()) / total
        p = self.fairness
        if p == 0:
            return math.exp(-mean)
        return float(abs(mean) ** (1.0 / p))


def _usable_gpus(snapshot: Snapshot) -> dict[str, int]:
    """By node: its GPUs; of a node that is closed to new jobs, those that are held."""
    usable = {node.id: node.num_gpus if node.schedulable else 0 for node in snapshot.cluster.nodes}
    closed = {node.id for node in snapshot.cluster.nodes if not node.schedulable}
    if closed:
        for placement in snapshot.running.values():
            for node, count in placement.shares:
                if node in closed:
                    usable[node] += count
    return usable


def gpu_cap(job: JobView) -> int:
    """Most GPUs a job may have now: it at most doubles the most it has run with (published)."""
    return min(max(2 * job.largest_gpus, job.limits.min_gpus), job.limits.max_gpus)


def restart_factors(snapshot: Snapshot, jobs: Sequence[JobView]) -> FloatArray:
    """`ρ = max(age - restarts·d, 0) / (age + d)`, Eq. (G24), d the job's own resize cost."""
    factors = np.empty(len(jobs))
    for i, job in enumerate(jobs):
        age, cost = max(snapshot.now - job.submitted_at, 0.0), job.resize_cost_seconds
        rho = max(age - job.num_restarts * cost, 0.0) / (age + cost) if age + cost > 0 else 1.0
        factors[i] = rho
    return factors
