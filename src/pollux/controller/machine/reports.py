"""Builds the goodput models that policies use from agents' reports."""

from __future__ import annotations

import math
from dataclasses import replace

from pollux.controller.messages.events import JobReported
from pollux.controller.state.lifecycle import JobState
from pollux.controller.state.records import JobRecord
from pollux.core import Cluster, GoodputFunction, InvalidInput
from pollux.goodput import (
    BatchLimits,
    CorrectedThroughput,
    Efficiency,
    GoodputModel,
    PublishedThroughput,
    ThroughputModel,
)
from pollux.goodput.bank import ModelBank
from pollux.wire.report import LARGEST_BATCH, LARGEST_NUMBER, LARGEST_SECONDS, ModelReport

__all__ = ["check_numbers", "completed_work", "learned", "limited", "model_from", "note_report"]

_NUM_PARAMETERS = 7
_MOST_TYPES = 16
_SHORTEST_SECONDS = 1e-15


def model_from(
    report: ModelReport, local_batch_max: int | None = None, before: GoodputFunction | None = None
) -> GoodputModel:
    """The reported model; its local batch is at most `local_batch_max`, if that is known.

    The reported throughput is for the GPU type that it was measured on; the model keeps other types from `before`. A
    type that was never measured counts as equal to the one that was measured last.
    """
    if len(report.parameters) != _NUM_PARAMETERS:
        raise InvalidInput(
            f"a model has {len(report.parameters)} parameters; give {_NUM_PARAMETERS}: αc βc αn βn αr βr γ"
        )
    _check_model(report)
    limits = BatchLimits(
        report.initial_batch, report.max_batch, report.local_batch_min, report.local_batch_max, report.accumulation
    )
    efficiency = Efficiency.from_estimates(report.initial_batch, report.grad_sqr, report.grad_var)
    # Shorter times cannot be measured, and ratios to them would overflow.
    parameters = [0.0 if 0.0 <= value < _SHORTEST_SECONDS else value for value in report.parameters]
    throughput: PublishedThroughput | CorrectedThroughput = PublishedThroughput(*parameters)
    if report.places:
        places = tuple((place.num_nodes, place.num_gpus, place.log_ratio) for place in report.places)
        throughput = CorrectedThroughput(PublishedThroughput(*parameters), places)
    by_type: dict[str, ThroughputModel] = {} if not isinstance(before, GoodputModel) else dict(before.by_type)
    if report.gpu_type:
        # The newest goes last; if there are too many, the oldest are dropped.
        by_type.pop(report.gpu_type, None)
        by_type = dict([*by_type.items(), (report.gpu_type, throughput)][-_MOST_TYPES:])
    model = GoodputModel(throughput, efficiency, limits, by_type)
    found = limited(model, local_batch_max)
    assert isinstance(found, GoodputModel)
    return found


def _check_model(report: ModelReport) -> None:
    """Refuse numbers larger than those of any training job, since products of them would overflow."""
    for name, value in zip(("αc", "βc", "αn", "βn", "αr", "βr"), report.parameters, strict=False):
        # `PublishedThroughput` refuses NaN and negative numbers.
        if value > LARGEST_SECONDS:
            raise InvalidInput(f"a model has {name} {value}; give at most {LARGEST_SECONDS:g} seconds")
    for name in ("initial_batch", "max_batch", "local_batch_min", "local_batch_max"):
        if getattr(report, name) > LARGEST_BATCH:
            raise InvalidInput(f"a model has {name} {getattr(report, name)}; give at most {LARGEST_BATCH:g} samples")
    for name in ("grad_sqr", "grad_var"):
        if abs(getattr(report, name)) > LARGEST_NUMBER:
            raise InvalidInput(f"a model has {name} {getattr(report, name)}; give at most {LARGEST_NUMBER:g}")


def check_numbers(event: JobReported) -> None:
    """Refuse a report with a number that no job can have."""
    for name in ("remaining", "resize_cost_seconds", "local_batch", "progress", "utilization", "memory_bytes"):
        value = getattr(event, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidInput(f"job '{event.job_id}' reports {name} {value}; give a finite number, 0 or more")
    if event.loss is not None and not math.isfinite(event.loss):
        raise InvalidInput(f"job '{event.job_id}' reports loss {event.loss}; give a finite number, or none")


def note_report(record: JobRecord, event: JobReported) -> None:
    """Note a checked report in the job's record; what the report leaves out stays as it was."""
    for name in ("goodput", "remaining", "progress", "local_batch", "utilization", "memory_bytes"):
        if getattr(event, name) is not None:
            setattr(record, name, getattr(event, name))
    if event.loss is not None:
        record.note_loss_value(event.loss)
    if event.live is not None and event.live is not record.live:
        record.live = event.live
        if record.costs:
            record.estimate_cost()
    if event.resize_cost_seconds is not None:
        record.note_pause(event.resize_kind, event.resize_cost_seconds)
    record.forget_view()


def learned(bank: ModelBank, record: JobRecord, cluster: Cluster, event: JobReported) -> ModelBank:
    """The bank with the measurements of a running job's report, for later jobs of its kind."""
    kind, model, place, batch = record.kind, record.goodput, record.placement, event.local_batch
    if not kind or not place or batch is None or record.state is not JobState.RUNNING:
        return bank
    if not isinstance(model, GoodputModel):
        return bank
    node = cluster.by_id.get(place.shares[0][0])
    where = ("" if node is None else node.gpu_type, place.num_nodes, place.num_gpus)
    return bank.measured(kind, model, where, batch, record.progress or 0.0, event.at)


def completed_work(bank: ModelBank, record: JobRecord) -> ModelBank:
    """The bank with the total work of a job that has succeeded, if the job has reported its progress."""
    if not record.kind or record.progress is None:
        return bank
    return bank.ended(record.kind, record.progress + (record.remaining or 0.0))


def limited(model: GoodputFunction | None, local_batch_max: int | None) -> GoodputFunction | None:
    """The model with a local batch of at most `local_batch_max` (None: unchanged)."""
    if model is None or local_batch_max is None:
        return model
    if not isinstance(model, GoodputModel) or model.limits.local_max <= local_batch_max:
        return model
    most = max(local_batch_max, 1)
    limits = replace(model.limits, local_max=most, local_min=min(model.limits.local_min, most))
    return replace(model, limits=limits)
