"""Applications from a few parameters instead of measurements, for any placement and cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

from pollux.core import InvalidInput, JobLimits, Queue
from pollux.goodput import BatchLimits, Efficiency, ThroughputModel
from pollux.goodput.corrected import CorrectedThroughput
from pollux.goodput.throughput import overlapped_seconds
from pollux.sim.applications.application import FixedConfiguration

__all__ = ["ModelledApplication", "NoiseSchedule", "Terms"]


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits, weight and queue that a user gave one job, beyond a line of a workload."""

    limits: JobLimits = field(default_factory=JobLimits)
    weight: float = 1.0
    queue: Queue | None = None

    def most_gpus(self, num_nodes: int, gpus_per_node: int) -> int:
        """The most GPUs that the job can have on equal nodes, by its limits and its queue's quota."""
        nodes = num_nodes if self.limits.max_nodes is None else min(self.limits.max_nodes, num_nodes)
        most = min(nodes * gpus_per_node, self.limits.max_gpus)
        quota = None if self.queue is None else self.queue.gpu_quota
        return most if quota is None else min(most, quota)


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """The noise scale φ over a training, in samples.

    It multiplies by `step` at each of `decays` (shares of the training at which the learning rate falls) and
    changes geometrically in between, so that it is `start` at the beginning and `end` at the end.
    """

    start: float
    end: float
    decays: tuple[float, ...] = ()
    step: float = 1.0

    def __post_init__(self) -> None:
        for name in ("start", "end", "step"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidInput(f"noise {name} is {value}; give a finite number above 0")
        bounds = (0.0, *self.decays, 1.0)
        if not all(early < late for early, late in pairwise(bounds)):
            raise InvalidInput(f"noise decays are {self.decays}; give ascending shares of the training, in (0, 1)")

    def at(self, share: float) -> float:
        """φ(x) = start · step^d(x) · (end / (start · step^D))^x, d(x) of D decays being over at x."""
        smooth = self.end / self.start / self.step ** len(self.decays)
        return float(self.start * self.step ** sum(decay <= share for decay in self.decays) * smooth**share)


@dataclass(frozen=True, slots=True)
class ModelledApplication:
    """An application whose truth is a formula: steps by a throughput model, noise by a schedule.

    `steps_per_epoch` are steps at the initial batch. An epoch has the noise scale of its middle, whatever
    the batch. A node that holds fewer GPUs than others keeps them waiting: T_sync grows by `imbalance` times
    1 − mean/max of the GPUs per node. Without `batch_sizes`, whole runs are known at the initial batch, its
    doublings and the maximum. `state_bytes` are those of parameters, optimiser and buffers; None: not known.
    """

    name: str
    throughput: ThroughputModel
    noise: NoiseSchedule
    limits: BatchLimits
    epochs: int
    steps_per_epoch: float
    batch_sizes: tuple[int, ...] = ()
    fixed: FixedConfiguration | None = None
    max_nodes: int = 4096
    imbalance: float = 0.2
    state_bytes: float | None = None
    progress: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _statistics: tuple[tuple[float, float], ...] = field(init=False, repr=False, compare=False)
    _times: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(init=False, repr=False, compare=False)
    _iterations: dict[int, tuple[float, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        if not self.batch_sizes:
            object.__setattr__(self, "batch_sizes", _doublings(self.limits.initial, self.limits.maximum))
        self._check_batches()
        progress = tuple(self.steps_per_epoch * (epoch + 1) for epoch in range(self.epochs))
        scales = (self.noise.at((epoch + 0.5) / self.epochs) for epoch in range(self.epochs))
        object.__setattr__(self, "progress", progress)
        # Only the ratio of the two matters, so the squared gradient is the unit.
        object.__setattr__(self, "_statistics", tuple((1.0, scale / self.limits.initial) for scale in scales))
        object.__setattr__(self, "_times", {})
        object.__setattr__(self, "_iterations", {})

    def _check_numbers(self) -> None:
        for name in ("epochs", "max_nodes"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise self._error(name, value, "give a whole number, 1 or more")
        if not (math.isfinite(self.steps_per_epoch) and self.steps_per_epoch > 0):
            raise self._error("steps_per_epoch", self.steps_per_epoch, "give a finite number above 0")
        if not (math.isfinite(self.imbalance) and self.imbalance >= 0):
            raise self._error("imbalance", self.imbalance, "give a finite number, 0 or more")
        if self.state_bytes is not None and not (math.isfinite(self.state_bytes) and self.state_bytes >= 0):
            raise self._error("state_bytes", self.state_bytes, "give a finite number of bytes, or None")

    def _check_batches(self) -> None:
        limits = self.limits
        inside = all(limits.initial <= size <= limits.maximum for size in self.batch_sizes)
        if not inside or any(small >= large for small, large in pairwise(self.batch_sizes)):
            raise self._error(
                "batch_sizes",
                self.batch_sizes,
                f"give ascending sizes from {limits.initial} to {limits.maximum}",
            )
        if self.fixed is not None:
            batch, num_gpus = self.fixed.batch_size, self.fixed.num_gpus
            if not limits.initial <= batch <= limits.maximum:
                raise self._error("fixed.batch_size", batch, f"give a batch from {limits.initial} to {limits.maximum}")
            if not 1 <= num_gpus <= batch // limits.local_min:
                raise self._error(
                    "fixed.num_gpus",
                    num_gpus,
                    f"a batch of {batch} runs on 1 to {batch // limits.local_min} GPUs",
                )

    def _error(self, name: str, value: object, remedy: str) -> InvalidInput:
        return InvalidInput(f"application '{self.name}': {name} is {value}; {remedy}")

    def step_and_sync_seconds(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """(T_grad^γ + T_sync^γ)^(1/γ), and the part of it beyond T_grad; the order of nodes does not matter."""
        key = (counts, local_batch)
        known = self._times.get(key)
        if known is None:
            known = self._times[key] = self._model_times(counts, local_batch)
        return known

    def _model_times(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        if not counts or min(counts) < 1:
            raise self._error("placement", counts, "give at least one GPU on every node")
        if local_batch < 1:
            raise self._error("local_batch", local_batch, "give at least 1 sample")
        num_nodes, num_gpus = len(counts), sum(counts)
        compute = self.throughput.compute_seconds(float(local_batch))
        sync = self.throughput.sync_seconds(float(num_nodes), float(num_gpus))
        sync *= 1.0 + self.imbalance * (1.0 - num_gpus / (num_nodes * max(counts)))
        step = overlapped_seconds(compute, sync, self.throughput.overlap)
        off = self.throughput.factor(num_nodes, num_gpus) if isinstance(self.throughput, CorrectedThroughput) else 1.0
        return off * step, off * (step - compute)

    def gradient_statistics(self, total_batch: float, epoch: int) -> tuple[float, float]:
        """(1, φ/M0) of the epoch, at every batch."""
        return self._statistics[epoch]

    def iterations(self, total_batch: int, epoch: int) -> float:
        """Σ over the first epochs of steps_per_epoch / gain(M/M0)."""
        run = self._iterations.get(total_batch)
        if run is None:
            run = self._iterations[total_batch] = self._run(total_batch)
        return run[epoch]

    def _run(self, total_batch: int) -> tuple[float, ...]:
        """Steps taken by the end of every epoch of a run, 0 first."""
        initial, steps = self.limits.initial, [0.0]
        for statistics in self._statistics:
            gain = Efficiency(initial, *statistics).gain(total_batch / initial)
            steps.append(steps[-1] + self.steps_per_epoch / gain)
        return tuple(steps)


def _doublings(initial: int, maximum: int) -> tuple[int, ...]:
    sizes = [initial]
    while sizes[-1] * 2 < maximum:
        sizes.append(sizes[-1] * 2)
    return (*sizes, maximum) if maximum > initial else (initial,)
