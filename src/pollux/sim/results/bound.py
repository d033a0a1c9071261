"""A lower bound on average completion times that no schedule can beat, for judging those that were made.

The relaxation: jobs are preempted at will and at no cost, GPU time can be divided at will, nothing is placed, every
job knows its true step times and gradient noise and runs each epoch at its best batch.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pollux.core import InvalidInput
from pollux.goodput import BatchChoice, split_total
from pollux.sim.applications.application import Application
from pollux.sim.applications.isolated import packed_counts
from pollux.sim.simulation.simulation import SimulationSettings
from pollux.sim.workloads.workload import Workload

__all__ = ["CompletionBound", "completion_bound"]

FloatArray = npt.NDArray[np.float64]

# How many total batches are tried between a batch and its double. The best lies between two of them; goodput is
# so flat there that the margin covers what is missed.
_PER_OCTAVE = 8
_MARGIN = 1.002


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
    needs = {
        name: _needs(applications[name], settings) for name in dict.fromkeys(job.application for job in workload.jobs)
    }
    alone = float(np.mean([needs[job.application][0] for job in workload.jobs]))
    arrivals = sorted((job.time, needs[job.application][1] / settings.num_gpus) for job in workload.jobs)
    return CompletionBound(alone, _shortest_first(arrivals))


def _needs(application: Application, settings: SimulationSettings) -> tuple[float, float]:
    """Least seconds with all GPUs, and least GPU-seconds, of a whole training."""
    most = min(settings.num_gpus, application.limits.maximum // application.limits.local_min)
    most = min(most, application.max_nodes * settings.gpus_per_node)
    if application.fixed is not None:
        most = min(most, application.fixed.num_gpus)
    work = np.diff(np.array((0.0, *application.progress)))
    rates = np.array([_rates(application, num_gpus, settings.gpus_per_node) for num_gpus in range(1, most + 1)])
    gpus = np.arange(1, most + 1)[:, None]
    seconds = float((work / rates.max(axis=0)).sum())
    gpu_seconds = float((work / (rates / gpus).max(axis=0)).sum())
    return seconds / _MARGIN, gpu_seconds / _MARGIN


def _rates(application: Application, num_gpus: int, gpus_per_node: int) -> FloatArray:
    """Most progress per second in every epoch on so many packed GPUs; 0 where it cannot run or was not measured."""
    best = np.zeros(len(application.progress))
    limits = application.limits
    counts = packed_counts(num_gpus, gpus_per_node)
    for total in _totals(application, num_gpus):
        with contextlib.suppress(InvalidInput):
            batch: BatchChoice = split_total(total, num_gpus, limits)
            step, sync = application.step_and_sync_seconds(counts, batch.local_batch)
            seconds = step + batch.accumulation * (step - sync)
            np.maximum(best, _gains(application, batch.total) / seconds, out=best)
    return best


def _totals(application: Application, num_gpus: int) -> list[int]:
    limits = application.limits
    if application.fixed is not None:
        return [application.fixed.batch_size]
    low, high = max(limits.initial, num_gpus * limits.local_min), limits.maximum
    if low > high:
        return []
    count = max(2, math.ceil(_PER_OCTAVE * math.log2(high / low)) + 1)
    full = {num_gpus * limits.local_max * repeats for repeats in range(1, high // (num_gpus * limits.local_max) + 1)}
    totals = {round(total) for total in np.geomspace(low, high, count).tolist()}
    return sorted(total for total in totals | full if low <= total <= high)


def _gains(application: Application, total: int) -> FloatArray:
    epochs = range(len(application.progress))
    sqr, var = np.array([application.gradient_statistics(total, epoch) for epoch in epochs]).T
    scale = total / application.limits.initial
    gains: FloatArray = (var + sqr) / (var / scale + sqr)
    return gains


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
