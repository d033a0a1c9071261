"""Puts together what a job tells the scheduler: reports of replica 0, which `report_client` sends.

The fields of a report are in `pollux.wire.report`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Protocol

from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.distributed.environment import Environment
from pollux.agent.reporting.receipt_row import finite
from pollux.agent.reporting.report_client import Address, Reporter
from pollux.goodput import GoodputModel, PublishedThroughput
from pollux.wire.report import ModelReport, NoiseReport, Report

__all__ = ["ReportBuilder", "Reported", "model_report"]


class Reported(Protocol):
    """What a report reads of a training: a job, or a framework's loop."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""

    @property
    def samples(self) -> int:
        """Samples that they used."""

    @property
    def progress(self) -> float:
        """Samples × efficiency."""

    @property
    def epochs_done(self) -> float:
        """Epochs of progress."""

    @property
    def num_replicas(self) -> int:
        """How many train together."""

    @property
    def batch_size(self) -> int:
        """Samples of a step over all replicas."""

    @property
    def local_batch(self) -> int:
        """Samples of a micro-step on one replica."""

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of a step."""

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """Factors of the learning rates by parameter group."""

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale."""

    @property
    def efficiency(self) -> float:
        """Progress per sample."""

    @property
    def goodput_model(self) -> GoodputModel | None:
        """What was fitted; None before that."""

    @property
    def is_exact(self) -> bool:
        """Whether the run follows the curve of plain PyTorch."""

    def expected_progress(self, epochs: float) -> float | None:
        """The progress at the end of that many epochs."""

    def last_metrics(self) -> Mapping[str, float]:
        """The user's own numbers, by name."""


class ReportBuilder:
    """Puts one job's reports together at its rounds, and knows the pause that came before its first step."""

    def __init__(self, reporter: Reporter, environment: Environment, gpu_type: str) -> None:
        self._reporter = reporter
        self._environment = environment
        self._gpu_type = gpu_type
        self._metrics: dict[str, float] = {}
        self._epochs: float | None = None
        self.live = False
        self._pause: float | None = None
        self._kind = ""
        self._stepped = False
        self._saved_at: float | None = None
        self.checkpoint_seconds: float | None = None

    @classmethod
    def of(cls, environment: Environment, gpu_type: str) -> ReportBuilder | None:
        """A builder where the scheduler that started this replica wants reports from it, else None."""
        if not environment.url or environment.replica != 0:
            return None
        address = Address(environment.url, environment.job, environment.job_token, environment.ca_file, environment.ca)
        return cls(Reporter.to(address), environment, gpu_type)

    def wants_epochs(self, count: float) -> None:
        """Training is to last that many epochs."""
        self._epochs = count

    def logged(self, values: Mapping[str, float]) -> None:
        """The user's newest metrics."""
        self._metrics.update(values)

    def saved(self, at: float | None) -> None:
        """When the last checkpoint was made, in seconds since 1970; None where that is not known."""
        self._saved_at = at

    def heard_of_save(self, at: float | None) -> None:
        """When a checkpoint of another process was made; the newest one that is known counts."""
        if at is not None:
            self._saved_at = at if self._saved_at is None else max(at, self._saved_at)

    @property
    def knows_of_checkpoint(self) -> bool:
        """Whether it was told when the last checkpoint was made."""
        return self._saved_at is not None

    def stepped(self) -> None:
        """A step is done; the first one ends the pause of the re-allocation before it."""
        if not self._stepped:
            self._stepped = True
            stopped_at = self._environment.stopped_at
            self._pause = None if stopped_at is None else max(time.time() - stopped_at, 0.0)
            self._kind = "" if stopped_at is None else "restart"

    def moved(self, environment: Environment) -> None:
        """The job goes on as another generation."""
        self._environment = environment

    def resized(self, seconds: float, kind: str) -> None:
        """Training paused that long for other replicas; `kind` as in `pollux.wire.report`."""
        self._pause, self._kind = seconds, kind

    def round(self, job: Reported, loss: float | None, throughput: float | None) -> None:
        """Offer a report, if one could be sent now."""
        if self._reporter.wants_report:
            self._reporter.offer(self._report(job, loss, throughput, final=False))

    def close(self, job: Reported, loss: float | None, throughput: float | None, final: bool) -> None:
        """Send the last report of this process, and end; `final`: the job is done."""
        self._reporter.close(self._report(job, loss, throughput, final))

    def _report(self, job: Reported, loss: float | None, throughput: float | None, final: bool) -> Report:
        """A report of where the job stands; numbers that are not finite are left out."""
        model, efficiency, rate = job.goodput_model, job.efficiency, finite(throughput)
        total_progress = None if self._epochs is None else job.expected_progress(self._epochs)
        metrics = self._metrics or job.last_metrics()
        return Report(
            generation=self._environment.generation,
            step=job.step,
            samples=job.samples,
            progress=job.progress,
            epoch=job.epochs_done,
            num_replicas=job.num_replicas,
            num_nodes=self._environment.num_nodes,
            batch_size=job.batch_size,
            local_batch=job.local_batch,
            accumulation=job.accumulation,
            learning_rate_factor=sum(job.lr_factors) / max(len(job.lr_factors), 1),
            efficiency=efficiency,
            throughput=rate,
            step_seconds=None if not rate else job.batch_size / rate,
            goodput=None if rate is None else rate * efficiency,
            total_progress=finite(total_progress),
            noise=_noise(job.noise),
            model=None if model is None else model_report(model, self._gpu_type),
            loss=finite(loss),
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            resize_seconds=finite(self._pause),
            resize_kind=self._kind,
            live=self.live,
            checkpoint_age_seconds=None if self._saved_at is None else max(time.time() - self._saved_at, 0.0),
            checkpoint_seconds=finite(self.checkpoint_seconds),
            exact=job.is_exact,
            final=final,
        )


def model_report(model: GoodputModel, gpu_type: str) -> ModelReport | None:
    """A goodput model as plain numbers; None for a throughput model of another kind than the published one."""
    throughput, limits = model.throughput, model.limits
    if not isinstance(throughput, PublishedThroughput):
        return None
    return ModelReport(
        parameters=tuple(float(value) for value in throughput.parameters),
        gpu_type=gpu_type,
        initial_batch=limits.initial,
        max_batch=limits.maximum,
        local_batch_max=limits.local_max,
        grad_sqr=model.efficiency.grad_sqr,
        grad_var=model.efficiency.grad_var,
        accumulation=limits.accumulation,
        local_batch_min=limits.local_min,
    )


def _noise(estimate: NoiseEstimate) -> NoiseReport | None:
    if estimate.num_measured == 0 or not math.isfinite(estimate.noise_scale):
        return None
    high = estimate.high if math.isfinite(estimate.high) else None
    return NoiseReport(estimate.noise_scale, estimate.low, high, estimate.num_measured)
