"""Turns an agent's report into an event for the controller; see `Controller.is_news`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pollux.controller import JobRecord, JobReported
from pollux.controller.machine.reports import model_from
from pollux.controller.state.costs import LIVE_KINDS, RESTART
from pollux.core.errors import Conflict, InvalidInput
from pollux.store.protocol import TelemetryRow
from pollux.wire import codec
from pollux.wire.report import (
    LARGEST_NUMBER,
    MOST_ERROR_CHARACTERS,
    MOST_METRIC_LETTERS,
    MOST_METRICS,
    REPORT_VERSION,
    SMALLEST_NUMBER,
    Report,
)  # fmt: skip

__all__ = ["check_report", "event_of_report", "row_of"]

_COUNTS = (
    "step", "samples", "num_replicas", "num_nodes", "batch_size", "local_batch", "accumulation", "progress",
)  # fmt: skip
# Without losses and metrics, which may diverge.
_NUMBERS = (
    "progress", "epoch", "learning_rate_factor", "efficiency", "throughput", "step_seconds", "goodput",
    "total_progress", "resize_seconds", "checkpoint_age_seconds", "checkpoint_seconds",
)  # fmt: skip
_NOT_NEGATIVE = ("total_progress", "resize_seconds")


# A pause may seem this much longer than it can have been.
_CLOCKS_DIFFER_SECONDS = 600.0


def check_report(record: JobRecord, report: Report) -> None:
    """Refuse a report with an invalid version, generation, number or model."""
    _check_origin(record, report)
    fault = next(_faults_of(report), None)
    if fault is not None:
        raise InvalidInput(f"job '{record.spec.id}' reports {fault}")
    if report.model is not None and report.generation != record.generation:
        # A model in use is checked when it is made; an unused one must be valid, too.
        model_from(report.model)


def _check_origin(record: JobRecord, report: Report) -> None:
    job_id = record.spec.id
    if not 1 <= report.version <= REPORT_VERSION:
        raise InvalidInput(
            f"job '{job_id}' reports in version {report.version}, this service reads 1 to {REPORT_VERSION}; upgrade it"
        )
    if report.generation < 0:
        raise InvalidInput(f"job '{job_id}' reports for generation {report.generation}; give 0 or more")
    if report.generation > record.generation:
        raise Conflict(
            f"job '{job_id}' reports for generation {report.generation}, but only {record.generation} were started; "
            "is another service running it?"
        )


def _faults_of(report: Report) -> Iterator[str]:
    yield from _below_zero({name: getattr(report, name) for name in _COUNTS})
    numbers = _numbers_of(report)
    yield from _out_of_range(numbers)
    if len(report.checkpoint_error) > MOST_ERROR_CHARACTERS:
        yield f"a checkpoint_error of {len(report.checkpoint_error)} characters; give at most {MOST_ERROR_CHARACTERS}"
    if len(report.metrics) > MOST_METRICS:
        yield f"{len(report.metrics)} metrics; give at most {MOST_METRICS}"
    if (longest := max(map(len, report.metrics), default=0)) > MOST_METRIC_LETTERS:
        yield f"a metric whose name has {longest} letters; give at most {MOST_METRIC_LETTERS}"
    kinds = (RESTART, *LIVE_KINDS)
    if report.resize_kind not in ("", *kinds):
        yield f"resize_kind '{report.resize_kind[:80]}'; give one of {', '.join(kinds)}"
    if report.noise is not None:
        yield from _below_zero({"noise.measured": report.noise.measured})
    yield from _below_zero({name: numbers[name] for name in _NOT_NEGATIVE}, "give 0 or more, or null")


def _numbers_of(report: Report) -> dict[str, float | None]:
    """The numbers that have limits, by name."""
    numbers = {name: getattr(report, name) for name in _NUMBERS}
    if report.noise is not None:
        numbers |= {f"noise.{name}": getattr(report.noise, name) for name in ("scale", "low", "high")}
    return numbers


def _out_of_range(numbers: Mapping[str, float | None]) -> Iterator[str]:
    for name, value in numbers.items():
        if value is not None and not abs(value) <= LARGEST_NUMBER:
            yield f"{name} {value}; give a number up to {LARGEST_NUMBER:g}"
        elif value is not None and 0.0 < abs(value) < SMALLEST_NUMBER:
            yield f"{name} {value}; give 0, or a number from {SMALLEST_NUMBER:g} on"


def _below_zero(numbers: Mapping[str, float | None], remedy: str = "give 0 or more") -> Iterator[str]:
    for name, value in numbers.items():
        if value is not None and value < 0:
            yield f"{name} {value}; {remedy}"


def event_of_report(record: JobRecord, report: Report, at: float) -> JobReported | None:
    """The event of a report; None if it comes from an earlier generation."""
    if report.generation != record.generation:
        return None
    remaining = None
    if report.total_progress is not None:
        remaining = max(report.total_progress - report.progress, 0.0)
    pause_seconds = _restart_pause(record, report, at)
    kind = "" if pause_seconds is None else report.resize_kind
    return JobReported(
        at,
        record.spec.id,
        goodput=None if report.model is None else model_from(report.model, record.local_batch_max, record.goodput),
        remaining=remaining,
        progress=report.progress,
        resize_cost_seconds=pause_seconds,
        local_batch=report.local_batch or None,
        resize_kind=kind,
        live=report.live,
        loss=_harmless(report.loss),
        generation=report.generation if kind else None,
    )


def _restart_pause(record: JobRecord, report: Report, at: float) -> float | None:
    """The pause of a restart, which only the job itself knows; the backend reports the pause of a live resize."""
    if report.resize_seconds is None or report.resize_kind in LIVE_KINDS:
        return None
    # A pause that began before the job had its GPUs was measured by a clock that somebody has moved.
    longest = at - record.held_since + _CLOCKS_DIFFER_SECONDS
    return None if report.resize_seconds > longest else report.resize_seconds


def row_of(job_id: str, at: float, report: Report) -> TelemetryRow:
    """The report as a measurement; a loss or metric that diverged is left out, one too small to divide by is 0."""
    metrics = {name: _harmless(value) for name, value in report.metrics.items()}
    harmless = {name: value for name, value in metrics.items() if value is not None}
    values: Mapping[str, Any] = codec.encode(replace(report, loss=_harmless(report.loss), metrics=harmless))
    return TelemetryRow(job_id, at, "report", values)


def _harmless(value: float | None) -> float | None:
    """A loss or metric within the limits of other numbers; None where it is too large."""
    if value is None or not abs(value) <= LARGEST_NUMBER:
        return None
    return value if abs(value) >= SMALLEST_NUMBER else 0.0
