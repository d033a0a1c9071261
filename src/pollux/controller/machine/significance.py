"""Whether a report is significant: enough to be logged as a fact, or to make another decision."""

from __future__ import annotations

from collections.abc import Iterable

from pollux.controller.messages.events import JobReported
from pollux.controller.state.lifecycle import ENDED
from pollux.controller.state.records import JobRecord
from pollux.core import Cluster, GoodputFunction

__all__ = ["drifted", "is_news", "predicted", "remember_predictions"]

# Relative changes since the last logged value that are significant.
_GOODPUT = 0.02
_GOODPUT_ELSEWHERE = 0.05
_REMAINING = 0.02
_COST = 0.10
_LOCAL_BATCH = 0.10


def predicted(record: JobRecord, model: GoodputFunction, cluster: Cluster, factor: int = 1) -> float:
    """The goodput that `model` predicts for the job's placement, or for `factor` times as many GPUs and nodes."""
    placement = record.placement
    node = cluster.by_id.get(placement.shares[0][0])
    gpu_type = "" if node is None else node.gpu_type
    return model.goodput(factor * placement.num_nodes, factor * placement.num_gpus, gpu_type)


def remember_predictions(records: Iterable[JobRecord], cluster: Cluster) -> None:
    """Note the predictions on which a decision was made."""
    for record in records:
        record.decided_goodput = None
        if record.goodput is not None and record.placement:
            record.decided_goodput = predicted(record, record.goodput, cluster)


def drifted(record: JobRecord, cluster: Cluster, share: float) -> bool:
    """Whether a running job's prediction changed by more than `share` since the last decision, or is its first."""
    if record.goodput is None or not record.placement:
        return False
    if record.decided_goodput is None:
        return True
    return abs(predicted(record, record.goodput, cluster) - record.decided_goodput) > share * record.decided_goodput


def is_news(record: JobRecord, event: JobReported, cluster: Cluster) -> bool:
    """Whether the report could change a decision, so that it must become a fact.

    Compared with the last logged values, these are significant: a first model; a change of the predicted goodput by 2 %
    at the present placement, or by 5 % at twice its size; of the remaining work by 2 %; of the resize cost or the local
    batch by 10 %; a new pause of a known kind; a change of `live`; and after a loss, any progress, since the next loss
    is judged by it.
    """
    if record.state in ENDED:
        return False
    return (
        _moved(record.remaining, event.remaining, _REMAINING)
        or _cost_moved(record, event)
        or _progressed_after_loss(record, event)
        or event.live not in (None, record.live)
        or _moved(record.local_batch, event.local_batch, _LOCAL_BATCH)
        or _model_moved(record, event.goodput, cluster)
    )


def _cost_moved(record: JobRecord, event: JobReported) -> bool:
    if event.resize_kind and event.resize_cost_seconds is not None:
        return not record.knows_pause(event.resize_kind, event.resize_cost_seconds, event.generation)
    return _moved(record.resize_cost_seconds, event.resize_cost_seconds, _COST)


def _progressed_after_loss(record: JobRecord, event: JobReported) -> bool:
    if not record.losses or record.is_beyond_loss(record.remaining, record.progress):
        return False
    first = record.progress is None and event.progress is not None
    return first or record.is_beyond_loss(event.remaining, event.progress)


def _model_moved(record: JobRecord, model: GoodputFunction | None, cluster: Cluster) -> bool:
    known = record.goodput
    if model is None or known is None:
        return model is not None
    if model is known or not record.placement:
        return False
    return any(
        _moved(predicted(record, known, cluster, factor), predicted(record, model, cluster, factor), share)
        for factor, share in ((1, _GOODPUT), (2, _GOODPUT_ELSEWHERE))
    )


def _moved(before: float | None, after: float | None, share: float) -> bool:
    if after is None or before is None:
        return after is not None
    return abs(after - before) > share * abs(before)
