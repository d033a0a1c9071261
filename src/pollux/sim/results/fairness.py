"""Finish-time fairness ρ: the time of a job relative to that alone on its fair share of the cluster.

The isolated time is a property of job and cluster, so that ρ can be compared between policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from pollux.core import InvalidInput
from pollux.sim.applications.application import Application
from pollux.sim.applications.isolated import recorded_runs, run_seconds
from pollux.sim.simulation.simulation import JobOutcome, SimulationSettings

__all__ = ["DEFINITION", "IsolatedTimes", "average_contention", "finish_time_fairness"]

DEFINITION = (
    "Finish-time fairness ρ = (finished − submitted) / T_id. T_id is the time the job would need alone on "
    "its fair share of the cluster: share = GPUs / N_avg, with N_avg the time-average number of submitted, "
    "unfinished jobs over the job's life in that run. On k packed GPUs the job runs at the recorded batch "
    "size that ends it soonest (true step times and gradient noise, no waiting, no restarts), and may leave "
    "GPUs idle if that is faster; between whole k, T_id is linear; below the fewest GPUs it can run on, it "
    "grows as 1/share. An application with a fixed configuration keeps it. What the policy chose does not "
    "enter T_id, except that N_avg counts the jobs it left unfinished. ρ > 1 is unfair: worse than alone on "
    "the share."
)
"""The definition of ρ, which reports print."""


class IsolatedTimes:
    """T_id(application, share) on packed GPUs of one cluster; caches its results.

    T(k) is the shortest training over the recorded batch sizes on k GPUs; T_id(k) = min over k' ≤ k of T(k'),
    since a job need not use all it may. Configurations that a profile cannot answer do not count.
    """

    def __init__(self, applications: Mapping[str, Application], num_nodes: int = 16, gpus_per_node: int = 4) -> None:
        self._applications = applications
        self._num_nodes, self._gpus_per_node = num_nodes, gpus_per_node
        self._best: dict[str, list[float]] = {}

    def seconds(self, application: str, share: float) -> float:
        """T_id for a real-valued share of GPUs above 0.

        Linear between whole numbers; below the fewest GPUs k0 on which the job can run, T_id(k0)·k0/share.
        """
        if not (math.isfinite(share) and share > 0):
            raise InvalidInput(f"a fair share of {share} GPUs; give a finite number above 0")
        most = self._most_gpus(self._applications[application])
        floor, ceiling = min(math.floor(share), most), min(math.ceil(share), most)
        best = self._known(application, ceiling, most)
        fewest = next(k for k, seconds in enumerate(best) if math.isfinite(seconds))
        if share < fewest:
            return best[fewest] * fewest / share
        below, above = best[floor], best[ceiling]
        return below if floor == ceiling else below + (above - below) * (share - floor)

    def _most_gpus(self, application: Application) -> int:
        """The most GPUs it can use: in the cluster, on nodes that were measured, with its largest batch."""
        if application.fixed is not None:
            return min(application.fixed.num_gpus, self._num_nodes * self._gpus_per_node)
        nodes = min(self._num_nodes, application.max_nodes)
        largest = min(application.batch_sizes[-1], application.limits.maximum)
        return max(min(nodes * self._gpus_per_node, largest // application.limits.local_min), 1)

    def _known(self, name: str, up_to: int, most: int) -> list[float]:
        """T_id by whole GPUs, from 0 (never ends) to at least `up_to`, and on to the first finite one."""
        best = self._best.setdefault(name, [math.inf])
        while len(best) <= up_to or not math.isfinite(best[-1]):
            if len(best) > most:
                raise InvalidInput(
                    f"application '{name}': neither its recorded nor its fixed batch can be run on 1 to "
                    f"{most} packed GPUs ({self._gpus_per_node} per node) with the measured step times; "
                    "measure these placements"
                )
            best.append(min(best[-1], self._shortest(self._applications[name], len(best))))
        return best

    def _shortest(self, application: Application, num_gpus: int) -> float:
        fixed = application.fixed
        if fixed is None:
            runs = recorded_runs(application, num_gpus, self._gpus_per_node)
            return min(runs.values(), default=math.inf)
        if num_gpus == self._most_gpus(application):
            with suppress(InvalidInput):
                return run_seconds(application, fixed.batch_size, num_gpus, self._gpus_per_node)
        return math.inf


def average_contention(jobs: Sequence[JobOutcome]) -> NDArray[np.float64]:
    """N_avg of every job: mean number of submitted, unfinished jobs during its life, itself included."""
    submitted = np.array([job.submitted for job in jobs])
    finished = np.array([job.finished for job in jobs])

    def elapsed(marks: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Σ over marks of max(at − mark, 0)."""
        marks = np.sort(marks)
        before = np.searchsorted(marks, at)
        sums = np.concatenate(([0.0], np.cumsum(marks)))
        return at * before - sums[before]

    def job_seconds(at: NDArray[np.float64]) -> NDArray[np.float64]:
        """∫ of the number of unfinished jobs from the beginning up to `at`."""
        return elapsed(submitted, at) - elapsed(finished, at)

    contention: NDArray[np.float64] = (job_seconds(finished) - job_seconds(submitted)) / (finished - submitted)
    return contention


def finish_time_fairness(
    jobs: Sequence[JobOutcome],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    times: IsolatedTimes | None = None,
) -> list[float]:
    """ρ of every job of a run, see `DEFINITION`; `times` may be shared by runs on equal clusters."""
    times = times or IsolatedTimes(applications, settings.num_nodes, settings.gpus_per_node)
    shares = settings.num_gpus / average_contention(jobs)
    return [
        (job.finished - job.submitted) / times.seconds(job.application, float(share))
        for job, share in zip(jobs, shares, strict=True)
    ]
