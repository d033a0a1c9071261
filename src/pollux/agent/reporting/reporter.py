"""What a job tells the scheduler: reports of replica 0, sent by a thread that training never waits for.

What is in a report is `pollux.wire.report`. Without a scheduler (POLLUX_URL unset) none of this runs.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.environment import Environment
from pollux.core.errors import InvalidInput
from pollux.goodput import GoodputModel, PublishedThroughput
from pollux.wire.report import ModelReport, NoiseReport, Report

__all__ = ["Address", "ReportBuilder", "Reported", "Reporter", "model_report", "post_report", "report_of"]

_log = logging.getLogger("pollux")
_TIMEOUT_SECONDS = 10.0
_LEAST_GAP_SECONDS = 2.0
_LEAST_SHARE = 0.25
_EVERY_SECONDS = 30.0
_MOST_EVERY_SECONDS = 600.0
_BACKOFF_SECONDS = (1.0, 60.0)
_NEWS = 0.05
_LARGEST_REPLY = 65_536

Post = Callable[[str], Mapping[str, Any]]


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


@dataclass(frozen=True, slots=True)
class Address:
    """Where one job's reports go: the service's URL, the job's id there, and the token that opens it.

    `ca`, or the file `ca_file`: a certificate to trust beside the system's, as PEM text; empty and None for none.
    """

    url: str
    job_id: str
    token: str
    ca_file: Path | None = None
    ca: str = ""

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(f"POLLUX_URL is '{self.url}': give http://host:port, or unset it to report nowhere")


def post_report(address: Address, body: str) -> Mapping[str, Any]:
    """Send one report and return the answer; raises OSError where the service is not there or refuses."""
    parts = urllib.parse.urlsplit(address.url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS, context=_trusting(address)
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECONDS)
    try:
        headers = {"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
        connection.request("POST", f"/v1/jobs/{urllib.parse.quote(address.job_id, safe='')}/reports", body, headers)
        response = connection.getresponse()
        text = response.read(_LARGEST_REPLY)
        if response.status >= 300:
            raise ConnectionError(f"the scheduler answered {response.status}: {text[:200].decode('utf-8', 'replace')}")
        reply = json.loads(text)
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"the scheduler's answer makes no sense ({error})") from error
    finally:
        connection.close()
    return reply if isinstance(reply, dict) else {}


def _trusting(address: Address) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if address.ca or address.ca_file is not None:
        context.load_verify_locations(None if address.ca else address.ca_file, cadata=address.ca or None)
        # What is named here is trusted itself, also where an authority that is not there has signed it.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


class Reporter:
    """Keeps the newest report and sends it when it is time: as often as the service asks, and sooner where it has news.

    A first model or another batch goes 2 seconds after the report before it; a rate that moved, after a quarter of the
    time that the service asks for. `offer` is called by training and returns at once. What cannot be sent is replaced
    by what is newer; training goes on without a scheduler for as long as it takes.
    """

    def __init__(self, post: Post, clock: Callable[[], float] = time.monotonic) -> None:
        self._post = post
        self._clock = clock
        self._condition = threading.Condition()
        self._newest: Report | None = None
        self._sent: Report | None = None
        self._next_at = -math.inf
        self._sent_at = -math.inf
        self._every = _EVERY_SECONDS
        self._failures = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    @classmethod
    def to(cls, address: Address) -> Reporter:
        """A reporter over HTTP."""
        return cls(lambda body: post_report(address, body))

    @property
    def wants_report(self) -> bool:
        """Whether a report offered now could be sent; asked before one is put together."""
        with self._condition:
            is_time = self._failures > 0 or self._clock() >= self._sent_at + _LEAST_GAP_SECONDS
            return not self._closed and is_time

    def offer(self, report: Report) -> None:
        """Take a newer report; it is sent when it is due, or at once where it has news."""
        with self._condition:
            if self._closed:
                return
            self._newest = report
            if self._failures == 0 and self._sent is not None:
                self._next_at = self._due_at(self._sent, report)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="pollux-reports", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def close(self, last: Report | None = None, timeout_seconds: float = 3.0) -> None:
        """End the thread; `last` is sent after what is on its way, once, without retries, and all within that time."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._newest = None
            self._condition.notify_all()
        if last is not None:
            thread = threading.Thread(target=self._send_last, args=(last,), name="pollux-last-report", daemon=True)
            thread.start()
            thread.join(timeout_seconds)

    def _send_last(self, report: Report) -> None:
        if self._thread is not None:
            self._thread.join()
        self._send(report)

    def _due_at(self, before: Report, after: Report) -> float:
        """When a report is to follow the one that was sent."""
        gap = self._every
        if _is_urgent(before, after):
            gap = _LEAST_GAP_SECONDS
        elif _has_moved(before, after):
            gap = max(_LEAST_GAP_SECONDS, _LEAST_SHARE * self._every)
        return self._sent_at + min(gap, self._every)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (self._newest is None or self._clock() < self._next_at):
                    wait = None if self._newest is None else max(self._next_at - self._clock(), 0.0)
                    self._condition.wait(wait)
                if self._closed or self._newest is None:
                    return
                report, self._newest = self._newest, None
            self._send(report)

    def _send(self, report: Report) -> None:
        try:
            reply = self._post(json.dumps(asdict(report), allow_nan=False))
            failure = ""
        except (OSError, ValueError) as error:
            reply, failure = {}, str(error) or type(error).__name__
        with self._condition:
            now = self._clock()
            if failure:
                self._failures += 1
                low, high = _BACKOFF_SECONDS
                self._next_at = now + min(low * 2.0 ** min(self._failures - 1, 10), high)
                if self._newest is None:
                    self._newest = report
                if self._failures == 1:
                    _log.warning("this report did not reach the scheduler (%s); training goes on", failure)
                return
            if self._failures:
                _log.info("the scheduler is there again after %d failed reports", self._failures)
            self._failures, self._sent = 0, report
            every = reply.get("report_every_seconds")
            if isinstance(every, int | float) and math.isfinite(every):
                self._every = min(max(float(every), _LEAST_GAP_SECONDS), _MOST_EVERY_SECONDS)
            self._sent_at = now
            self._next_at = self._due_at(report, self._newest or report)


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
        """A teller where the scheduler that started this replica wants reports from it, else None."""
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
        """The last checkpoint there is was made then, in seconds since 1970; None where nobody knows."""
        self._saved_at = at

    def heard_of_save(self, at: float | None) -> None:
        """Somebody's checkpoint was made then; the newest that is known of counts."""
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
        return report_of(
            job,
            generation=self._environment.generation,
            loss=loss,
            throughput=throughput,
            total_progress=None if self._epochs is None else job.expected_progress(self._epochs),
            metrics=self._metrics or job.last_metrics(),
            resize_seconds=self._pause,
            resize_kind=self._kind,
            live=self.live,
            checkpoint_age_seconds=None if self._saved_at is None else max(time.time() - self._saved_at, 0.0),
            checkpoint_seconds=self.checkpoint_seconds,
            num_nodes=self._environment.num_nodes,
            gpu_type=self._gpu_type,
            final=final,
        )


def _is_urgent(before: Report, after: Report) -> bool:
    """Whether the scheduler should hear at once: a first model, or another batch."""
    return (before.model is None) != (after.model is None) or before.batch_size != after.batch_size


def _has_moved(before: Report, after: Report) -> bool:
    if before.goodput is None or after.goodput is None:
        return before.goodput is not after.goodput
    return abs(after.goodput - before.goodput) > _NEWS * before.goodput


def report_of(
    job: Reported,
    *,
    generation: int,
    loss: float | None = None,
    throughput: float | None = None,
    total_progress: float | None = None,
    metrics: Mapping[str, float] | None = None,
    resize_seconds: float | None = None,
    resize_kind: str = "",
    live: bool = False,
    checkpoint_age_seconds: float | None = None,
    checkpoint_seconds: float | None = None,
    num_nodes: int = 1,
    gpu_type: str = "",
    final: bool = False,
) -> Report:
    """A report of where the job stands; numbers that are not finite are left out."""
    model, efficiency = job.goodput_model, job.efficiency
    rate = _finite(throughput)
    return Report(
        generation=generation,
        step=job.step,
        samples=job.samples,
        progress=job.progress,
        epoch=job.epochs_done,
        num_replicas=job.num_replicas,
        num_nodes=num_nodes,
        batch_size=job.batch_size,
        local_batch=job.local_batch,
        accumulation=job.accumulation,
        learning_rate_factor=sum(job.lr_factors) / max(len(job.lr_factors), 1),
        efficiency=efficiency,
        throughput=rate,
        step_seconds=None if not rate else job.batch_size / rate,
        goodput=None if rate is None else rate * efficiency,
        total_progress=_finite(total_progress),
        noise=_noise(job.noise),
        model=None if model is None else model_report(model, gpu_type),
        loss=_finite(loss),
        metrics={name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)},
        resize_seconds=_finite(resize_seconds),
        resize_kind=resize_kind,
        live=live,
        checkpoint_age_seconds=_finite(checkpoint_age_seconds),
        checkpoint_seconds=_finite(checkpoint_seconds),
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
