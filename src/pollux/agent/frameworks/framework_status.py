"""For a framework's training loop: what the scheduler is told of it, and the request to stop that it makes.

The order of a training is in `framework_loop`; saving is the framework's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pollux.agent.adaptation.adaptation import Adaptation, RoundReport
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.step_requests import STOP, StepRequests
from pollux.agent.environment import Environment
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.goodput import GoodputModel

__all__ = ["HostedReports", "HostedStatus"]


class HostedStatus:
    """Where a framework's training stands, in the words of a report; read by `reporting` as it reads a job."""

    def __init__(self, adaptation: Adaptation, progress: TrainingProgress, num_replicas: int) -> None:
        self._adaptation = adaptation
        self._progress = progress
        self.num_replicas = num_replicas

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self._progress.steps

    @property
    def samples(self) -> int:
        """Samples that optimiser steps have used."""
        return self._progress.samples

    @property
    def progress(self) -> float:
        """Samples × efficiency, in samples at the initial batch."""
        return self._progress.progress

    @property
    def epochs_done(self) -> float:
        """Epochs of progress so far."""
        return self._progress.epochs

    @property
    def batch_size(self) -> int:
        """Samples of one optimiser step over all replicas."""
        return self._adaptation.total

    @property
    def local_batch(self) -> int:
        """Samples of one micro-step on one replica, at most."""
        return self._adaptation.choice.local_batch

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of one optimiser step."""
        return self._adaptation.choice.accumulation

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """What each parameter group's learning rate is multiplied by."""
        return self._adaptation.factors(self._adaptation.total, self._progress.epochs)

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale with its interval."""
        return self._adaptation.estimate()

    @property
    def efficiency(self) -> float:
        """Progress per sample at the present batch."""
        return self._adaptation.counted(self._adaptation.total)

    @property
    def goodput_model(self) -> GoodputModel | None:
        """Throughput and efficiency as known now; None before a first fit."""
        return self._adaptation.goodput_model

    @property
    def is_exact(self) -> bool:
        """Whether the batch stays the user's; what the framework does to exactness is not known here."""
        return not self._adaptation.adapts

    def expected_progress(self, epochs: float) -> float | None:
        """The progress at the end of that many epochs; None while an epoch's size is not known."""
        size = self._progress.epoch_size
        return None if size is None else float(epochs * size)

    def last_metrics(self) -> Mapping[str, float]:
        """None: what is logged goes to the framework's loggers."""
        return {}


class HostedReports:
    """Reports of replica 0 to the scheduler that started it, and requests to stop, agreed on by all replicas."""

    def __init__(self, environment: Environment, status: HostedStatus, gpu_type: str, epochs: float | None) -> None:
        self._status = status
        self._last = RoundReport(None, None)
        self._teller = ReportBuilder.of(environment, gpu_type)
        if self._teller is not None and epochs is not None:
            self._teller.wants_epochs(epochs)
        self._watch: StepRequests | None = None

    def listen(self, replicas: ReplicaGroup) -> None:
        """From here on SIGTERM is a request to stop after a step, whatever it meant before."""
        if self._watch is None:
            self._watch = StepRequests(replicas, None)

    def wants_stop(self) -> bool:
        """Whether all replicas are to save and stop now; asked after each step, on all of them."""
        return self._watch is not None and STOP in self._watch.at_boundary(self._status.step)

    def stepped(self) -> None:
        """A step is done."""
        if self._teller is not None:
            self._teller.stepped()

    def saved(self) -> None:
        """The framework has asked for the state of a checkpoint."""
        if self._teller is not None:
            self._teller.saved(time.time())

    def round(self, report: RoundReport) -> None:
        """Tell what a round found."""
        self._last = report
        if self._teller is not None:
            self._teller.round(self._status, report.loss, report.throughput)

    def close(self, final: bool) -> None:
        """Send the last report (`final`: the job is done), and give the signals back."""
        teller, self._teller = self._teller, None
        if teller is not None:
            teller.close(self._status, self._last.loss, self._last.throughput, final)
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
