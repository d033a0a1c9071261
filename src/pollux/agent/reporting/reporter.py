"""Builds the reports of a job to the scheduler; `report_client` sends them.

The fields of a report are in `pollux.wire.report`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.distributed.environment import Environment
from pollux.agent.reporting.receipt_row import finite
from pollux.agent.reporting.report_client import Address, Reporter
from pollux.agent.reporting.status import TrainingStatus
from pollux.goodput import CorrectedThroughput, GoodputModel, PublishedThroughput
from pollux.wire.report import (
    MOST_ERROR_CHARACTERS,
    MOST_METRIC_LETTERS,
    MOST_METRICS,
    ModelReport,
    NoiseReport,
    PlaceCorrection,
    Report,
)  # fmt: skip

__all__ = ["ReportBuilder", "model_report", "reporter_for"]

_log = logging.getLogger("pollux")


class ReportBuilder:
    """Builds the reports of one job at its rounds, and the last one; only replica 0 sends them.

    On the other replicas it takes notes, in case this process becomes replica 0. `live` says whether the job can change
    its replicas while it runs, `checkpoint_seconds` how long the last checkpoint took, `checkpoint_error` why it
    failed.
    """

    def __init__(
        self, status: TrainingStatus, environment: Environment, gpu_type: str, reporter: Reporter | None = None
    ) -> None:
        self.live = False
        self.checkpoint_seconds: float | None = None
        self.checkpoint_error = ""
        self._status = status
        self._environment = environment
        self._gpu_type = gpu_type
        self._reporter = reporter or reporter_for(environment)
        self._metrics: dict[str, float] = {}
        self._epochs: float | None = None
        self._restart_seconds: float | None = None
        self._stepped = False
        self._warned = False
        self._saved_at: float | None = None

    def set_epochs(self, count: float) -> None:
        """Note how many epochs training lasts."""
        self._epochs = count

    def add_metrics(self, values: Mapping[str, float]) -> None:
        """Put the user's newest metrics into the next reports."""
        self._metrics.update(values)
        self._metrics = self._few_metrics(self._metrics)

    def _few_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those that a report takes; the receipt has them all."""
        named = [name for name in metrics if len(name) <= MOST_METRIC_LETTERS][:MOST_METRICS]
        if len(named) < len(metrics) and not self._warned:
            self._warned = True
            _log.warning(
                "%d metrics are in the receipt only: a report takes %d, with names of at most %d letters",
                len(metrics) - len(named), MOST_METRICS, MOST_METRIC_LETTERS,
            )  # fmt: skip
        return {name: metrics[name] for name in named}

    def note_save(self, at: float | None) -> None:
        """Note when the last checkpoint was made, in seconds since 1970; None where that is not known."""
        self._saved_at = at

    def note_save_elsewhere(self, at: float | None) -> None:
        """Note when another process made a checkpoint; the newest known one counts."""
        if at is not None:
            self._saved_at = at if self._saved_at is None else max(at, self._saved_at)

    def note_step(self) -> None:
        """Note a step; the first one ends the pause of the restart before it."""
        if not self._stepped:
            self._stepped = True
            stopped_at = self._environment.stopped_at
            if stopped_at is not None:
                self._restart_seconds = max(time.time() - stopped_at, 0.0)

    def enter_generation(self, generation: int, replica: int, num_nodes: int) -> bool:
        """Report for another generation of the job, in which this process is replica number `replica`.

        Returns whether the age of the last checkpoint has to be looked up, since another process may have written it.
        """
        was_first = self._environment.replica == 0
        self._environment = replace(self._environment, generation=generation, replica=replica, num_nodes=num_nodes)
        # The backend reports the pause of a live change; that of the restart belongs to the generation before.
        self._stepped, self._restart_seconds = True, None
        if was_first:
            return self._reporter is not None and replica == 0 and self._saved_at is None
        self._reporter = self._reporter or reporter_for(self._environment)
        return self._reporter is not None and replica == 0

    def round(self, report: RoundReport) -> None:
        """Send a report after a round, if the scheduler wants one now."""
        if self._environment.replica == 0 and self._reporter is not None and self._reporter.wants_report:
            self._reporter.offer(self._report(report, final=False))

    def close(self, report: RoundReport, final: bool) -> None:
        """Send the last report of this process, with the numbers of its last round; `final`: the job is done."""
        if self._environment.replica == 0 and self._reporter is not None:
            self._reporter.close(self._report(report, final))

    def _report(self, last_round: RoundReport, final: bool) -> Report:
        """A report of where the job stands; numbers that are not finite are left out."""
        job, rate = self._status, finite(last_round.throughput)
        model, efficiency = job.reported_model, job.efficiency
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
            loss=finite(last_round.loss),
            metrics={name: float(value) for name, value in self._few_metrics(metrics).items() if math.isfinite(value)},
            resize_seconds=finite(self._restart_seconds),
            resize_kind="" if self._restart_seconds is None else "restart",
            live=self.live,
            checkpoint_age_seconds=None if self._saved_at is None else max(time.time() - self._saved_at, 0.0),
            checkpoint_seconds=finite(self.checkpoint_seconds),
            checkpoint_error=self.checkpoint_error[:MOST_ERROR_CHARACTERS],
            exact=job.is_exact,
            final=final,
        )


def reporter_for(environment: Environment) -> Reporter | None:
    """A sender of reports on replica 0, if the scheduler that started it wants them; else None."""
    if not environment.url or environment.replica != 0:
        return None
    return Reporter.to(
        Address(
            environment.url,
            environment.job,
            environment.job_token,
            environment.ca_file,
            environment.ca,
            environment.server_user,
        )
    )


def model_report(model: GoodputModel, gpu_type: str) -> ModelReport | None:
    """A goodput model as plain numbers; None for a throughput model of another kind than the published one."""
    throughput, limits = model.throughput, model.limits
    places: tuple[PlaceCorrection, ...] = ()
    if isinstance(throughput, CorrectedThroughput):
        places = tuple(PlaceCorrection(*place) for place in throughput.places)
        throughput = throughput.base
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
        places=places,
    )


def _noise(estimate: NoiseEstimate) -> NoiseReport | None:
    if estimate.num_measured == 0 or not math.isfinite(estimate.noise_scale):
        return None
    high = estimate.high if math.isfinite(estimate.high) else None
    return NoiseReport(estimate.noise_scale, estimate.low, high, estimate.num_measured)
