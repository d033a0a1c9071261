"""One simulated training job: its progress, its pauses, its model and its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pollux.core import NOWHERE, GoodputFunction, InvalidInput, Placement
from pollux.goodput import (
    BatchChoice,
    BatchLimits,
    Efficiency,
    GoodputModel,
    Observation,
    PublishedThroughput,
    ThroughputModel,
    corrected,
    fit,
    split_total,
)
from pollux.sim.applications.application import Application
from pollux.sim.applications.isolated import packed_counts
from pollux.sim.simulation.disturbances import JobDisturbance

__all__ = ["Batching", "FixedBatch", "LearnedBatch", "Oracle", "Sample", "SimulatedJob", "packed_step_seconds"]


# A batch is kept unless another promises this much more. The published search tries 50 fixed totals and so cannot
# see smaller differences either; following them would refit the model at every epoch for nothing.
_BATCH_GAIN = 0.002

# On new GPUs, an agent has measured the step time after this time, and reports it.
_FIRST_REPORT_SECONDS = 10.0

# Rounding may leave a job this share of the clock short of its epoch's end; it counts as reached.
_CLOCK_RESOLUTION = 1e-9


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a job from `at` on, for plots."""

    at: float
    num_gpus: int
    total_batch: int
    efficiency: float


def _split(total: int, num_gpus: int, limits: BatchLimits) -> BatchChoice:
    """A total batch on K GPUs, Eq. (G13); if it divides badly, as many single samples as the maximum allows."""
    try:
        return split_total(total, num_gpus, limits)
    except InvalidInput:
        if total < 1 or not 1 <= num_gpus <= limits.maximum:
            raise
        return BatchChoice(1, limits.maximum // num_gpus - 1 if limits.accumulation else 0, num_gpus)


class Batching(Protocol):
    """How a job chooses its batch for a placement, and what it reports to the scheduler."""

    @property
    def learns(self) -> bool:
        """Whether it measures what steps take."""

    def choose(self, placement: Placement) -> BatchChoice:
        """The batch to run with on `placement`."""

    def observe(self, placement: Placement, batch: BatchChoice, times: tuple[float, float], noise: Efficiency) -> None:
        """Learn from the measurements of one interval."""

    def measured_local_batch(self, placement: Placement) -> int | None:
        """The local batch last measured on a placement of this size; `None` where there is none."""

    @property
    def model(self) -> GoodputFunction | None:
        """The job's model of its goodput; `None` before the first measurement."""


class FixedBatch:
    """The user's total batch, whatever the placement."""

    learns: ClassVar[bool] = False

    def __init__(self, application: Application, total: int) -> None:
        self._limits = application.limits
        self._total = total

    def choose(self, placement: Placement) -> BatchChoice:
        """Split the total over the replicas."""
        return _split(self._total, placement.num_gpus, self._limits)

    def observe(self, placement: Placement, batch: BatchChoice, times: tuple[float, float], noise: Efficiency) -> None:
        """A rigid job learns nothing."""

    def measured_local_batch(self, placement: Placement) -> None:
        """A rigid job measures nothing."""

    @property
    def model(self) -> None:
        """A rigid job has no model."""
        return


class LearnedBatch:
    """The batch of best goodput, by a model fitted to what this job has seen so far.

    The first value seen for each (nodes, GPUs, local batch) counts; a new key refits the model. Gradient
    statistics are the current true ones. `total` holds the batch of applications that may not adapt it.
    """

    learns: ClassVar[bool] = True

    def __init__(self, application: Application, total: int | None = None) -> None:
        self._limits = application.limits
        self._total = total
        self._seen: dict[tuple[int, int, int], Observation] = {}
        self._throughput: PublishedThroughput | None = None
        self._noise: Efficiency | None = None
        self._model: GoodputModel | None = None
        self._reported: GoodputModel | None = None
        self._corrected: ThroughputModel | None = None
        self._chosen: dict[tuple[int, int], BatchChoice] = {}
        self._last: tuple[tuple[int, int], BatchChoice] | None = None
        self._measured: tuple[int, int, int] | None = None

    @property
    def model(self) -> GoodputModel | None:
        """The current model, corrected by its residuals; the correction does not change the best batch."""
        return self._reported

    def measured_local_batch(self, placement: Placement) -> int | None:
        """The local batch that was measured last, if on this many nodes and GPUs."""
        last, here = self._measured, (placement.num_nodes, placement.num_gpus)
        return None if last is None or last[:2] != here else last[2]

    def choose(self, placement: Placement) -> BatchChoice:
        """Best batch by the model; before there is one, the smallest that is allowed."""
        limits, num_gpus = self._limits, placement.num_gpus
        if self._total is not None:
            return _split(self._total, num_gpus, limits)
        if self._model is None:
            return _split(max(limits.initial, limits.local_min * num_gpus), num_gpus, limits)
        key = (placement.num_nodes, num_gpus)
        choice = self._chosen.get(key)
        if choice is None:
            choice, best = self._model.best_batch(*key)
            if self._last is not None and self._last[0] == key:
                last = self._last[1]
                if best < (1.0 + _BATCH_GAIN) * self._model.goodput_at(last, placement.num_nodes):
                    choice = last
            self._chosen[key] = choice
            self._last = (key, choice)
        return choice

    def observe(self, placement: Placement, batch: BatchChoice, times: tuple[float, float], noise: Efficiency) -> None:
        """Record step times under their key, refit when the key is new, follow the noise."""
        key = (placement.num_nodes, placement.num_gpus, batch.local_batch)
        new_key = key not in self._seen
        self._measured = key
        if new_key:
            step, sync = times
            self._seen[key] = Observation(*key, compute_seconds=step - sync, step_seconds=step)
            self._throughput = fit(list(self._seen.values()), self._throughput).parameters
            if self._throughput is not None:
                self._corrected = corrected(self._throughput, list(self._seen.values()))
        if (new_key or noise != self._noise) and self._throughput is not None and self._corrected is not None:
            self._noise = noise
            self._model = GoodputModel(self._throughput, noise, self._limits)
            self._reported = GoodputModel(self._corrected, noise, self._limits)
            self._chosen.clear()


@dataclass(slots=True)
class SimulatedJob:
    """State of one job between two moments. Progress is in steps of the initial batch."""

    id: str
    application: Application
    batching: Batching
    whole_seconds: bool = False
    placement: Placement = NOWHERE
    batch: BatchChoice | None = None
    progress: float = 0.0
    epoch: int = 0
    standstill_seconds: float = 0.0
    completed_at: float | None = None
    clock: float = 0.0
    placed_at: float = 0.0
    disturbance: JobDisturbance | None = None
    samples: list[Sample] = field(default_factory=list)

    def place(self, placement: Placement, resize_seconds: float) -> None:
        """Move to other GPUs; the pause starts again, even during a pause."""
        self.placement = placement
        self.batch = self.batching.choose(placement) if placement else None
        self.standstill_seconds = resize_seconds if placement else 0.0
        self.placed_at = self.clock
        self._record()

    def advance(self, until: float, slowdown: float = 0.0) -> None:
        """Train up to a time; `slowdown` is the share of speed lost to interference.

        Epochs split the stretch, since noise changes there. With `whole_seconds` an epoch's end is rounded
        to a second, as in the published simulation.
        """
        if self.completed_at is not None or not self.placement:
            self.clock = until
            return
        delay = min(self.standstill_seconds, until - self.clock)
        self.standstill_seconds -= delay
        self.clock += delay
        while self.clock < until and self.completed_at is None:
            self._stretch(until, slowdown)

    def _stretch(self, until: float, slowdown: float) -> None:
        assert self.batch is not None
        rate, times, noise = self._rate(slowdown)
        if self.disturbance is not None:
            times, noise = self.disturbance.times(*times), self.disturbance.noise(noise)
        self.batching.observe(self.placement, self.batch, times, noise)
        target = self.application.progress[self.epoch]
        seconds = until - self.clock
        needed = (target - self.progress) / rate
        if needed > seconds + _CLOCK_RESOLUTION * max(until, 1.0):
            self.progress += rate * seconds
            self.clock = until
        else:
            self.clock += round(needed) if self.whole_seconds else needed
            self.progress = target
            self.epoch += 1
            if self.epoch == len(self.application.progress):
                self.completed_at = self.clock
                return
            self._record()
        batch = self.batching.choose(self.placement)
        if batch != self.batch:
            self.batch = batch
            self._record()

    def lose(self, checkpoint_seconds: float) -> None:
        """Fall back to the last checkpoint; one is written at every change of GPUs and then at intervals."""
        if self.completed_at is not None or not self.placement:
            return
        ran = max(self.clock - self.placed_at, 0.0)
        lost = ran % checkpoint_seconds if checkpoint_seconds else 0.0
        self.progress = max(self.progress - self._rate(0.0)[0] * lost, 0.0)
        self.epoch = next(e for e, target in enumerate(self.application.progress) if self.progress < target)

    def _rate(self, slowdown: float) -> tuple[float, tuple[float, float], Efficiency]:
        """Progress per second: gain over step time."""
        assert self.batch is not None
        times = step, sync = self.application.step_and_sync_seconds(self.placement.counts, self.batch.local_batch)
        initial, total = self.application.limits.initial, self.batch.total
        noise = Efficiency(initial, *self.application.gradient_statistics(total, self.epoch))
        seconds = step + self.batch.accumulation * (step - sync)
        return noise.gain(total / initial) / seconds * (1.0 - slowdown), times, noise

    def next_epoch_at(self, slowdown: float = 0.0) -> float | None:
        """When the current epoch ends if nothing changes; `None` while nothing runs."""
        if self.completed_at is not None or not self.placement:
            return None
        rate, _, _ = self._rate(slowdown)
        return self.clock + self.standstill_seconds + (self.application.progress[self.epoch] - self.progress) / rate

    def next_news_at(self, slowdown: float = 0.0) -> float | None:
        """When it next reports if nothing changes: at an epoch's end, or with the step time on new GPUs."""
        at = self.next_epoch_at(slowdown)
        if at is None or not self.batching.learns or self.batching.measured_local_batch(self.placement) is not None:
            return at
        return min(at, self.clock + self.standstill_seconds + _FIRST_REPORT_SECONDS)

    @property
    def useful_samples(self) -> float:
        """Useful samples so far."""
        return self.progress * self.application.limits.initial

    @property
    def remaining_samples(self) -> float:
        """Useful samples until the end."""
        return (self.application.progress[-1] - self.progress) * self.application.limits.initial

    def _record(self) -> None:
        total = self.batch.total if self.batch else 0
        efficiency = 0.0
        if self.batch and self.epoch < len(self.application.progress):
            limits = self.application.limits
            noise = Efficiency(limits.initial, *self.application.gradient_statistics(total, self.epoch))
            efficiency = float(noise.efficiency(total))
        self.samples.append(Sample(self.clock, self.placement.num_gpus, total, efficiency))


@dataclass(frozen=True, slots=True)
class Oracle:
    """True times of a job with a fixed batch, for policies that are allowed to know them."""

    job: SimulatedJob
    total_batch: int
    gpus_per_node: int
    known: dict[int, float] = field(default_factory=dict, compare=False)

    def step_seconds(self, num_gpus: int) -> float:
        """On as few nodes as possible; one GPU accumulates at least once."""
        seconds = self.known.get(num_gpus)
        if seconds is None:
            seconds = self.known[num_gpus] = packed_step_seconds(
                self.job.application, self.total_batch, num_gpus, self.gpus_per_node
            )
        return seconds

    def remaining_steps(self) -> float:
        """From the recorded run at this batch; 1 when the job has outlived it."""
        application, last = self.job.application, len(self.job.application.progress)
        # Counted from the end of the current epoch, as published; so there is nothing left in the last one.
        current = self.job.epoch + 1
        if current >= last:
            return 1.0
        return application.iterations(self.total_batch, last) - application.iterations(self.total_batch, current)


def packed_step_seconds(application: Application, total_batch: int, num_gpus: int, gpus_per_node: int) -> float:
    """Step time of a fixed total batch on as few nodes as possible."""
    counts = packed_counts(num_gpus, gpus_per_node)
    batch = _split(total_batch, num_gpus, application.limits)
    accumulation, local = batch.accumulation, batch.local_batch
    if num_gpus == 1 and accumulation == 0:
        accumulation, local = 1, -(-total_batch // 2)
    step, sync = application.step_and_sync_seconds(counts, local)
    return step + accumulation * (step - sync)
