"""A job's measurements over time for the plots of its page: reports with predictions, decisions with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pollux.controller.explanations.explain import explain
from pollux.core.errors import InvalidInput
from pollux.service.engine.engine import Engine
from pollux.service.views.timeline import Reallocation
from pollux.store.protocol import TelemetryRow

__all__ = ["predicted_seconds", "series_of"]

_TOLD = ("placed", "shrunk", "ended", "paused", "cancelled", "finished")


def series_of(engine: Engine, job_id: str, kind: str, since: float, limit: int) -> list[dict[str, Any]]:
    """Rows of `at` and `values`, oldest first.

    `report`: what the agent reported, and `predicted_step_seconds`, predicted by the previous report's model for this
    placement and batch. `decision`: GPUs before and after, the policy's code or how they were lost, and the sentence.
    """
    if kind == "decision":
        return _decisions(engine, job_id, since)[-limit:]
    rows = engine.series(job_id, kind, since, limit)
    if kind != "report":
        return [{"at": row.at, "values": dict(row.values)} for row in rows]
    # The first of these rows has no report before it, so its own model is used.
    model = rows[0].values.get("model") if rows and since > 0.0 else None
    return list(_reports(rows, model))


def _reports(rows: Iterable[TelemetryRow], model: Mapping[str, Any] | None) -> Iterable[dict[str, Any]]:
    for row in rows:
        values = dict(row.values)
        values["predicted_step_seconds"] = predicted_seconds(model, values)
        model = values.get("model") or model
        yield {"at": row.at, "values": values}


def predicted_seconds(model: Mapping[str, Any] | None, values: Mapping[str, Any]) -> float | None:
    """Seconds of one optimiser step by a reported model, for the placement and batch of a report; None: not known."""
    from pollux.goodput import PublishedThroughput

    replicas, nodes, local = values.get("num_replicas"), values.get("num_nodes"), values.get("local_batch")
    if model is None or not replicas or not nodes or not local:
        return None
    try:
        throughput = PublishedThroughput(*model["parameters"])
        return float(
            throughput.step_seconds(
                float(min(nodes, replicas)), float(replicas), float(local), float(values.get("accumulation") or 0)
            )
        )
    except (InvalidInput, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None


def _decisions(engine: Engine, job_id: str, since: float) -> list[dict[str, Any]]:
    texts = {line.at: line.text for line in engine.events_of(job_id) if line.kind in _TOLD}
    return [
        {
            "at": found.at,
            "values": {
                "from": found.before,
                "to": found.after,
                "reason": found.reason,
                "text": texts.get(found.at) or _sentence(found),
            },
        }
        for found in engine.views.timeline.reallocations_of(job_id)
        if found.at >= since
    ]


def _sentence(found: Reallocation) -> str:
    """The sentence of a decision that is older than the job's kept events."""
    return "" if found.cause is None else explain(found.cause, found.job_id)[0]
