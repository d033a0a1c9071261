"""A lower bound on average completion times that no schedule can beat, for judging those that were made.

The relaxation: jobs are preempted at will and at no cost, GPU time can be divided at will, nothing is placed, every
job knows its true step times and gradient noise and runs each epoch in its best configuration.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pollux.sim.applications.application import Application
from pollux.sim.results.best_rates import best_rates
from pollux.sim.simulation.simulation import SimulationSettings
from pollux.sim.workloads.workload import Workload

__all__ = ["CompletionBound", "completion_bound"]


@dataclass(frozen=True, slots=True)
class CompletionBound:
    """The bound in seconds, and the two it is the larger of.

    `alone`: every job has the whole cluster for itself, all the time. `shared`: the cluster is one machine that
    only hands out GPU-seconds, every job needs only the GPU-seconds of its most frugal configuration, and
    the shortest remaining goes first, which is the best order for one machine.
    """

    alone: float
    shared: float

    @property
    def seconds(self) -> float:
        """Average completion time that no schedule can beat."""
        return max(self.alone, self.shared)


def completion_bound(
    workload: Workload, applications: Mapping[str, Application], settings: SimulationSettings
) -> CompletionBound:
    """The bound for one workload on one cluster."""
    asked: dict[str, set[tuple[int, int]]] = {}
    for job in workload.jobs:
        asked.setdefault(job.application, set()).add((job.num_gpus, job.batch_size))
    needs = {name: _needs(applications[name], settings, sorted(requests)) for name, requests in asked.items()}
    alone = float(np.mean([needs[job.application][0] for job in workload.jobs]))
    arrivals = sorted((job.time, needs[job.application][1] / settings.num_gpus) for job in workload.jobs)
    return CompletionBound(alone, _shortest_first(arrivals))


def _needs(
    application: Application, settings: SimulationSettings, requests: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    """Least seconds with all GPUs, and least GPU-seconds, of a whole training.

    In rounds an epoch's end is rounded to a second. That may save half a second of T, the least time of an epoch; so
    of its GPU-seconds no more than a share 1/(2T), whatever it ran on before.
    """
    work = np.diff(np.array((0.0, *application.progress)))
    rates = best_rates(application, settings.num_nodes, settings.gpus_per_node, requests)
    seconds, gpu_seconds = (np.divide(work, each, out=np.zeros_like(work), where=each > 0.0) for each in rates)
    if settings.trigger == "rounds":
        left = np.maximum(1.0 - 0.5 / np.maximum(seconds, 0.5), 0.0)
        seconds, gpu_seconds = seconds * left, gpu_seconds * left
    return float(seconds.sum()), float(gpu_seconds.sum())


def _shortest_first(arrivals: list[tuple[float, float]]) -> float:
    """Average completion time on one machine that serves the shortest remaining first."""
    waiting: list[float] = []
    now, total, ended = 0.0, 0.0, 0
    for index, (at, _) in enumerate([*arrivals, (math.inf, 0.0)]):
        while waiting and now < at:
            left = heapq.heappop(waiting)
            if now + left <= at:
                now += left
                total += now
                ended += 1
            else:
                heapq.heappush(waiting, left - (at - now))
                now = at
        if index < len(arrivals):
            now = max(now, at)
            heapq.heappush(waiting, arrivals[index][1])
    return (total - sum(at for at, _ in arrivals)) / max(ended, 1)
