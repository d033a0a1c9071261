"""From an agent's report to a fact for the controller. Which facts are news is the controller's to say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pollux.controller import JobRecord, JobReported
from pollux.controller.machine.reports import model_from
from pollux.controller.state.costs import LIVE_KINDS, RESTART
from pollux.core.errors import Conflict, InvalidInput
from pollux.store.protocol import TelemetryRow
from pollux.wire import codec
from pollux.wire.report import LARGEST_NUMBER, REPORT_VERSION, Report

__all__ = ["check_report", "fact_of", "row_of"]

# What is a number of its own; losses and metrics may diverge.
_NUMBERS = (
    "progress", "epoch", "learning_rate_factor", "efficiency", "throughput", "step_seconds", "goodput",
    "total_progress", "resize_seconds", "checkpoint_age_seconds", "checkpoint_seconds",
)  # fmt: skip


def check_report(record: JobRecord, report: Report) -> None:
    """Refuse a report of a version or generation that cannot be, with numbers below zero, or a model that is none."""
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
    for name in (
        "step",
        "samples",
        "num_replicas",
        "num_nodes",
        "batch_size",
        "local_batch",
        "accumulation",
        "progress",
    ):
        if getattr(report, name) < 0:
            raise InvalidInput(f"job '{job_id}' reports {name} {getattr(report, name)}; give 0 or more")
    for name in _NUMBERS:
        value = getattr(report, name)
        if value is not None and not abs(value) <= LARGEST_NUMBER:
            raise InvalidInput(f"job '{job_id}' reports {name} {value}; give a number up to {LARGEST_NUMBER:g}")
    if report.noise is not None:
        for name in ("scale", "low", "high"):
            value = getattr(report.noise, name)
            if value is not None and not abs(value) <= LARGEST_NUMBER:
                raise InvalidInput(
                    f"job '{job_id}' reports noise.{name} {value}; give a number up to {LARGEST_NUMBER:g}"
                )
    if report.resize_kind not in ("", RESTART, *LIVE_KINDS):
        known = ", ".join((RESTART, *LIVE_KINDS))
        raise InvalidInput(f"job '{job_id}' reports resize_kind '{report.resize_kind[:80]}'; give one of {known}")
    if report.noise is not None and report.noise.measured < 0:
        raise InvalidInput(f"job '{job_id}' reports noise.measured {report.noise.measured}; give 0 or more")
    for name in ("total_progress", "resize_seconds"):
        value = getattr(report, name)
        if value is not None and value < 0:
            raise InvalidInput(f"job '{job_id}' reports {name} {value}; give 0 or more, or null")
    if report.model is not None and report.generation != record.generation:
        # What is not taken up is to be right all the same; a model that is, is checked when it is made.
        model_from(report.model)


def fact_of(record: JobRecord, report: Report, at: float) -> JobReported | None:
    """What of a report can change a decision; None where it comes from replicas that are no longer the job's."""
    if report.generation != record.generation:
        return None
    remaining = None
    if report.total_progress is not None:
        remaining = max(report.total_progress - report.progress, 0.0)
    cost = report.resize_seconds
    return JobReported(
        at,
        record.spec.id,
        goodput=None if report.model is None else model_from(report.model, record.local_batch_max, record.goodput),
        remaining=remaining,
        progress=report.progress,
        resize_cost_seconds=cost if cost is not None and math.isfinite(cost) else None,
        local_batch=report.local_batch or None,
        resize_kind=report.resize_kind,
        live=report.live,
    )


def row_of(job_id: str, at: float, report: Report) -> TelemetryRow:
    """The report as a measurement; a loss or metric that diverged beyond all bounds is left out."""
    loss = None if report.loss is None or not abs(report.loss) <= LARGEST_NUMBER else report.loss
    metrics = {name: value for name, value in report.metrics.items() if abs(value) <= LARGEST_NUMBER}
    values: Mapping[str, Any] = codec.encode(replace(report, loss=loss, metrics=metrics))
    return TelemetryRow(job_id, at, "report", values)
