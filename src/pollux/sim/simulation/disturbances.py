"""What goes wrong in a simulated world: wrong measurements, false or missing reports, failing nodes.

All of it is drawn from a seed and the job's name, so that a run repeats and all policies meet the same disturbances.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pollux.core import InvalidInput, UnknownName
from pollux.goodput import Efficiency

__all__ = ["Disturbances", "JobDisturbance", "node_failures", "read_disturbances", "spot_preemptions"]

_SIZES = (
    "remaining_sigma", "lie_rise", "node_hours", "repair_seconds", "checkpoint_seconds", "spot_hours", "notice_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Sizes and rates; the defaults are a perfect world.

    `step_time` and `noise_scale` are the largest relative errors of measured step times and gradient noise, drawn
    evenly for every measurement. `remaining_sigma` is the spread of a log-normal factor, one a job, on its reported
    remaining work; a share `silent` of the jobs reports none, and a share `lying` always reports `lie` of its work as
    left; that share grows by the factor 1 + `lie_rise` while it works. `start_spread` is the largest relative error of
    pauses. A node fails every `node_hours` on average (0: never) and is back after `repair_seconds`; its jobs lose what
    they did since their last checkpoint, one every `checkpoint_seconds`. A node is taken away every `spot_hours` (0:
    never): it takes no new jobs for `notice_seconds`, then it is gone as after a failure, but with a notice its jobs
    have saved.
    """

    step_time: float = 0.0
    noise_scale: float = 0.0
    remaining_sigma: float = 0.0
    silent: float = 0.0
    lying: float = 0.0
    lie: float = 0.01
    lie_rise: float = 0.0
    start_spread: float = 0.0
    node_hours: float = 0.0
    repair_seconds: float = 300.0
    checkpoint_seconds: float = 300.0
    spot_hours: float = 0.0
    notice_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("step_time", "noise_scale", "silent", "lying", "lie", "start_spread"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise InvalidInput(f"{name} is {value}; give a share from 0 to below 1")
        for name in _SIZES:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise InvalidInput(f"{name} is {value}; give a finite number, 0 or more")


class JobDisturbance:
    """The disturbances of one job."""

    def __init__(self, world: Disturbances, seed: int, job_id: str) -> None:
        self._world = world
        self._stream = random.Random(f"{seed}/{job_id}")
        draws = random.Random(f"{seed}/{job_id}/reports")
        self.silent = draws.random() < world.silent
        self.lies = draws.random() < world.lying
        self._factor = math.exp(draws.gauss(0.0, world.remaining_sigma)) if world.remaining_sigma else 1.0

    def times(self, step: float, sync: float) -> tuple[float, float]:
        """Measured step and synchronisation seconds, off by one factor."""
        if not self._world.step_time:
            return step, sync
        factor = 1.0 + self._stream.uniform(-1.0, 1.0) * self._world.step_time
        return step * factor, sync * factor

    def noise(self, true: Efficiency) -> Efficiency:
        """Measured gradient noise; the scale is off, the signal is as it is."""
        if not self._world.noise_scale:
            return true
        factor = 1.0 + self._stream.uniform(-1.0, 1.0) * self._world.noise_scale
        return Efficiency(true.initial_batch, true.grad_sqr, true.grad_var * factor)

    def remaining(self, left: float, total: float) -> float | None:
        """The remaining work that the job reports; `left` is the true one."""
        if self.silent:
            return None
        if not self.lies:
            return left * self._factor
        return self._world.lie * total * (1.0 + self._world.lie_rise * (1.0 - left / total if total else 0.0))

    def pause(self, seconds: float) -> float:
        """How long a change really takes."""
        if not self._world.start_spread:
            return seconds
        return seconds * (1.0 + self._stream.uniform(-1.0, 1.0) * self._world.start_spread)


def node_failures(world: Disturbances, seed: int, num_nodes: int) -> Iterator[tuple[float, int]]:
    """When which node fails, in order, for ever; none where nodes do not fail."""
    yield from _at_random(world.node_hours, random.Random(f"{seed}/nodes"), num_nodes)


def spot_preemptions(world: Disturbances, seed: int, num_nodes: int) -> Iterator[tuple[float, int]]:
    """When the notice comes that which node is taken away, in order, for ever; none where none are."""
    yield from _at_random(world.spot_hours, random.Random(f"{seed}/spot"), num_nodes)


def _at_random(hours: float, stream: random.Random, num_nodes: int) -> Iterator[tuple[float, int]]:
    at = 0.0
    while hours:
        at += stream.expovariate(num_nodes / (hours * 3600.0))
        yield at, stream.randrange(num_nodes)


def read_disturbances(text: str) -> Disturbances:
    """Disturbances written as `name=value,name=value`."""
    known = [field.name for field in fields(Disturbances)]
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known:
            raise UnknownName("disturbance", name, known)
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidInput(f"{name} is '{value}'; give a number, as in {name}=0.1") from None
    return Disturbances(**found)
