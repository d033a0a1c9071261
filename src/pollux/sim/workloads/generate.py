"""Generated workloads: jobs that arrive as in a trace of a real cluster, or by a built-in distribution.

What a trace tells of a job is its arrival, GPU time and GPU count; the GPU time chooses an application of
that size, and `user_requests` its GPUs and batch. Only `random()` of Python's generator is used, since its stream is
promised to stay: a seed means one workload.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple, TypeVar

from pollux.core import InvalidInput
from pollux.sim.applications.application import Application
from pollux.sim.applications.tables import number, read_rows, whole
from pollux.sim.workloads.classes import CLASSES, application_class, class_of
from pollux.sim.workloads.user_requests import Users
from pollux.sim.workloads.workload import Workload, WorkloadJob

__all__ = ["GenerateSettings", "generate_workload"]

_SHORTEST_SECONDS = 60.0
_MOST_GPU_HOURS = 1000.0
_DAY = 86_400.0
_PEAK_SHARE = 0.65

_Option = TypeVar("_Option")


_MOST_JOBS = 1_000_000
_MOST_HOURS = 366 * 24


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """How many jobs in how many hours, and for which cluster their users chose GPUs and batch.

    `load` multiplies the number of jobs. `realistic` users ask for the GPUs that the trace says and a batch
    that is only roughly right; others ask for a tuned configuration.
    """

    num_jobs: int = 160
    hours: float = 8.0
    load: float = 1.0
    realistic: bool = False
    seed: int = 1
    nodes: int = 16
    gpus_per_node: int = 4

    def __post_init__(self) -> None:
        for name in ("num_jobs", "nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value == int(value) and value >= 1):
                raise InvalidInput(f"{name.replace('_', '-')} is {value}; give a whole number, 1 or more")
        for name in ("hours", "load"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} is {value}; give a finite number above 0")
        if self.num_jobs * self.load > _MOST_JOBS:
            raise InvalidInput(
                f"jobs x load is {self.num_jobs} x {self.load:g}; give at most {_MOST_JOBS:,} jobs in all"
            )
        if self.hours > _MOST_HOURS:
            raise InvalidInput(f"hours is {self.hours:g}; give at most {_MOST_HOURS:,}, a year")

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def total_jobs(self) -> int:
        """Jobs after `load`."""
        return max(1, round(self.num_jobs * self.load))


class _Arrival(NamedTuple):
    """One job of a trace.

    `second` counts from midnight in the trace, and from the start of the window once it is sampled.
    """

    second: float
    gpu_hours: float
    num_gpus: int


def generate_workload(
    applications: Mapping[str, Application],
    settings: GenerateSettings,
    trace: Path | None = None,
    name: str = "workload",
) -> Workload:
    """Draw a workload; the same arguments give the same one.

    Jobs of the trace below 60 seconds or above 1000 GPU-hours are left out. The days of the trace are laid
    over each other: single days differ tenfold in load, and many are one user's sweep, while the time of day
    keeps the bursts that all days share. The window starts so that the busiest hour comes after about two
    thirds of it; beyond a day, the day repeats. Every job is drawn once before any is drawn again.

    Without a trace, arrivals are a Poisson process whose rate triples around that hour of every day, and GPU
    times a mixture of log-normals: 95 % with a median of 0.3 GPU-hours (σ 1.8), 5 % with one of 60 (σ 1.3).

    For one seed, jobs and arrivals do not depend on `realistic`, and the jobs of a lower `load` are among
    those of a higher one.
    """
    if not applications:
        raise InvalidInput("no applications to draw jobs from; give at least one")
    window = settings.hours * 3600.0
    stream = random.Random(f"{settings.seed} arrivals")
    users = Users(applications, settings.nodes, settings.gpus_per_node)
    choices = random.Random(f"{settings.seed} configurations")
    arrivals = _synthetic(stream, window) if trace is None else _drawn(_read_trace(trace), stream, window)
    classes = _classes(users)
    requests: list[tuple[int, str, int, int]] = []
    for arrival in islice(arrivals, settings.total_jobs):
        application = _pick(stream, classes[class_of(arrival.gpu_hours)])
        if settings.realistic:
            options = users.realistic(application, arrival.num_gpus)
        else:
            options = users.tuned(application)
        requests.append((int(arrival.second), application, *_pick(choices, options)))
    requests.sort(key=lambda request: request[0])
    return Workload(
        name,
        tuple(
            WorkloadJob(f"{application}-{index}", float(time), application, num_gpus, batch)
            for index, (time, application, num_gpus, batch) in enumerate(requests)
        ),
    )


def _pick(stream: random.Random, options: Sequence[_Option]) -> _Option:
    return options[int(stream.random() * len(options))]


def _is_usable(seconds: float, gpu_hours: float) -> bool:
    return seconds >= _SHORTEST_SECONDS and 0.0 < gpu_hours <= _MOST_GPU_HOURS


def _read_trace(path: Path) -> list[_Arrival]:
    """The usable jobs of `timestamp,duration,num_gpus` lines (seconds); other columns do not count."""
    jobs: list[_Arrival] = []
    num_lines = 0
    remedy = "give a date and time like 2017-10-09 07:01:55, or a number of seconds"
    for row in read_rows(path, ("timestamp", "duration", "num_gpus")):
        num_lines += 1
        second: float = row.get("timestamp", _second_of_day, remedy)
        duration, num_gpus = number(row, "duration"), whole(row, "num_gpus")
        gpu_hours = duration * num_gpus / 3600.0
        if _is_usable(duration, gpu_hours):
            jobs.append(_Arrival(second, gpu_hours, num_gpus))
    if not jobs:
        raise InvalidInput(
            f"{path}: none of its {num_lines} jobs can be used; give jobs with num_gpus 1 or more, duration "
            f"{_SHORTEST_SECONDS:g} seconds or more, and at most {_MOST_GPU_HOURS:g} GPU-hours"
        )
    return jobs


def _second_of_day(raw: str) -> float:
    try:
        seconds = float(raw)
    except ValueError:
        at = datetime.fromisoformat(raw)
        return at.hour * 3600.0 + at.minute * 60.0 + at.second
    if not math.isfinite(seconds):
        raise ValueError(raw)
    return seconds % _DAY


def _window_start(jobs: Sequence[_Arrival], window: float) -> float:
    """The second of the day at which the window begins; on the hour, where the window has room for that."""
    by_hour = Counter(int(job.second // 3600) for job in jobs)
    busiest = max(by_hour, key=lambda hour: (by_hour[hour], -hour))
    seconds = sorted(job.second for job in jobs if int(job.second // 3600) == busiest)
    lead = _PEAK_SHARE * min(window, _DAY)
    start = seconds[len(seconds) // 2] - lead
    if min(window, _DAY) - lead > 3600.0:
        start = start // 3600 * 3600
    return start % _DAY


def _drawn(jobs: Sequence[_Arrival], stream: random.Random, window: float) -> Iterator[_Arrival]:
    """An endless sequence of jobs in random order, with their second in the window."""
    start = _window_start(jobs, window)
    shifted = (job._replace(second=(job.second - start) % _DAY) for job in jobs)
    inside = [job for job in shifted if job.second < window]
    num_days = math.ceil(window / _DAY)
    while True:
        for position in _shuffled(stream, len(inside) * num_days):
            day, index = divmod(position, len(inside))
            second = inside[index].second + day * _DAY
            if second < window:
                yield inside[index]._replace(second=second)


def _shuffled(stream: random.Random, size: int) -> Iterator[int]:
    """0 to size − 1 in random order; a lazy shuffle."""
    moved: dict[int, int] = {}
    for position in range(size):
        other = position + int(stream.random() * (size - position))
        yield moved.get(other, other)
        moved[other] = moved.get(position, position)


def _synthetic(stream: random.Random, window: float) -> Iterator[_Arrival]:
    """An endless sequence of made-up arrivals, with the rate 1 + 2·exp(−h²/8), h hours from the daily peak."""
    peak = _PEAK_SHARE * min(window, _DAY)
    while True:
        second = stream.random() * window
        # Counted from the nearest peak, of the same or another day.
        hours_off = ((second - peak) / 3600.0 + 12.0) % 24.0 - 12.0
        if stream.random() * 3.0 > 1.0 + 2.0 * math.exp(-(hours_off**2) / 8.0):
            continue
        median, spread = (0.3, 1.8) if stream.random() < 0.95 else (60.0, 1.3)
        # Zero has no quantile, so it is replaced.
        gpu_hours = median * math.exp(spread * NormalDist().inv_cdf(stream.random() or 0.5))
        several = stream.random() < (0.02, 0.05, 0.4, 0.8)[class_of(gpu_hours)]
        num_gpus = _pick(stream, (2, 4, 4, 8, 8, 16)) if several else 1
        if _is_usable(gpu_hours * 3600.0 / num_gpus, gpu_hours):
            yield _Arrival(second, gpu_hours, num_gpus)


def _classes(users: Users) -> list[list[str]]:
    """Applications of each class; an empty class gets those of the nearest class that has some."""
    own: list[list[str]] = [[] for _ in CLASSES]
    for name in sorted(users.applications):
        own[application_class(name, users.least_gpu_hours)].append(name)
    filled = [index for index, names in enumerate(own) if names]
    return [own[min(filled, key=lambda other: (abs(other - index), other))] for index in range(len(own))]
