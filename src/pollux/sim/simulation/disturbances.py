"""What goes wrong in a simulated world: wrong measurements, false or missing reports, failing nodes.

All of it is drawn from a seed and the job's name, so that a run repeats and all policies meet the same disturbances.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from pollux.core import InvalidInput
from pollux.goodput import Efficiency

__all__ = ["Disturbances", "JobDisturbance", "node_failures"]


@dataclass(frozen=True, slots=True)
class Disturbances:
    """Sizes and rates; the defaults are a perfect world.

    `step_time` and `noise_scale` are the largest relative errors of measured step times and gradient noise, drawn
    evenly for every measurement. `remaining_sigma` is the spread of a log-normal factor, one a job, on its reported
    remaining work; a share `silent` of the jobs reports none, and a share `lying` always reports `lie` of its work as
    left. `start_spread` is the largest relative error of pauses. A node fails every `node_hours` on average (0: never)
    and is back after `repair_seconds`; its jobs lose what they did since their last checkpoint, one every
    `checkpoint_seconds`.
    """

    step_time: float = 0.0
    noise_scale: float = 0.0
    remaining_sigma: float = 0.0
    silent: float = 0.0
    lying: float = 0.0
    lie: float = 0.01
    start_spread: float = 0.0
    node_hours: float = 0.0
    repair_seconds: float = 300.0
    checkpoint_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("step_time", "noise_scale", "silent", "lying", "lie", "start_spread"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise InvalidInput(f"{name} is {value}; give a share from 0 to below 1")
        for name in ("remaining_sigma", "node_hours", "repair_seconds", "checkpoint_seconds"):
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
        return self._world.lie * total if self.lies else left * self._factor

    def pause(self, seconds: float) -> float:
        """How long a change really takes."""
        if not self._world.start_spread:
            return seconds
        return seconds * (1.0 + self._stream.uniform(-1.0, 1.0) * self._world.start_spread)


def node_failures(world: Disturbances, seed: int, num_nodes: int) -> Iterator[tuple[float, int]]:
    """When which node fails, in order, for ever; none where nodes do not fail."""
    if not world.node_hours:
        return
    stream, at = random.Random(f"{seed}/nodes"), 0.0
    while True:
        at += stream.expovariate(num_nodes / (world.node_hours * 3600.0))
        yield at, stream.randrange(num_nodes)
