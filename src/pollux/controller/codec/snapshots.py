"""The state of jobs, nodes and queues as JSON values and back: what a snapshot in a store holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pollux.controller.codec.events import decode_value, encode_model, encode_value
from pollux.controller.state.cluster_state import ClusterState
from pollux.controller.state.lifecycle import JobState
from pollux.controller.state.node_trust import NodeTrust
from pollux.controller.state.records import JobRecord
from pollux.core import Cluster, InvalidInput, Node, Queue
from pollux.core.errors import StoreFailed

__all__ = ["decode_state", "decoded", "encode_state"]

_Part = TypeVar("_Part")

_FORMAT = 1

_PLAIN = (
    "submitted_at", "generation", "held_since", "held_seconds", "attained_gpu_seconds", "num_starts", "largest_gpus",
    "started_at", "ended_at", "detail", "remaining", "resize_cost_seconds", "decided_goodput", "crashes", "streak",
    "losses", "remaining_at_loss", "eligible_at", "local_batch", "local_batch_max", "reason_at",
)  # fmt: skip
"""Fields of a record that are numbers, text or None: they are written as they are."""

_NEWER = (
    "live", "failed_moves", "failed_move_at", "running_since", "refusals", "capped_until", "progress",
    "progress_at_loss", "aged_since", "quiet_until", "utilization", "memory_bytes", "hidden_since", "hidden_seconds",
)  # fmt: skip
"""Fields of that kind that older states lack."""

_CACHED = ("spec", "goodput", "reason")
"""Fields that seldom change: their written form is kept with the record."""


def encode_state(state: ClusterState) -> Callable[[], dict[str, Any]]:
    """A function that encodes nodes, queues and every job as they are now; call it later, in any one thread at a time.

    Do not change its result: parts of it are reused the next time.
    """
    cluster, queues, trust = state.cluster, [*state.queues.values()], state.trust.state()
    # Records of ended jobs do not change any more.
    records = [copy.copy(record) if job_id in state.active else record for job_id, record in state.jobs.items()]
    return lambda: {
        "format": _FORMAT,
        "nodes": encode_value(cluster.nodes),
        "queues": encode_value(queues),
        "jobs": [_encode_record(record) for record in records],
        "trust": trust,
    }


def _encode_record(record: JobRecord) -> dict[str, Any]:
    encoded = {name: getattr(record, name) for name in (*_PLAIN, *_NEWER)}
    for name in ("costs", "last_pause", "state", "placement", "waiting_for", "loss_history"):
        encoded[name] = encode_value(getattr(record, name))
    for name in _CACHED:
        encoded[name] = _cached_form(record, name)
    return encoded


def _cached_form(record: JobRecord, name: str) -> Any:
    """The written form of a field that seldom changes; reused while the field is the same object."""
    value = getattr(record, name)
    if value is None:
        return None
    last = record.written.get(name)
    if last is None or last[0] is not value:
        last = record.written[name] = (value, encode_model(value) if name == "goodput" else encode_value(value))
    return last[1]


def decode_state(saved: Mapping[str, Any]) -> ClusterState:
    """The state that `encode_state` wrote."""
    if saved.get("format") != _FORMAT:
        raise StoreFailed(
            f"a saved state has format {saved.get('format')!r}, this version of Pollux reads {_FORMAT}; "
            "use the version that wrote it, or replay the whole log"
        )
    return decoded(_decode_cluster, saved)


def decoded(decode: Callable[[Mapping[str, Any]], _Part], saved: Mapping[str, Any]) -> _Part:
    """A part of a saved state, read by `decode`; StoreFailed if it is damaged."""
    try:
        return decode(saved)
    except (KeyError, TypeError, ValueError, InvalidInput) as error:
        raise StoreFailed(f"a saved state is damaged ({error!r}); replay the whole log") from error


def _decode_cluster(saved: Mapping[str, Any]) -> ClusterState:
    nodes = decode_value(tuple[Node, ...], saved["nodes"], "nodes")
    queues = decode_value(tuple[Queue, ...], saved["queues"], "queues")
    state = ClusterState(Cluster.of(nodes), queues)
    # States from before nodes were set aside have no `trust`.
    state.trust = NodeTrust.restored(saved.get("trust", {}))
    for job in saved["jobs"]:
        state.add(_decode_record(job))
    return state


def _decode_record(job: Mapping[str, Any]) -> JobRecord:
    fields = {name: job[name] for name in (*_PLAIN, "state", "placement", "waiting_for", *_CACHED)}
    fields |= {name: job[name] for name in (*_NEWER, "costs", "last_pause", "loss_history") if name in job}
    record = decode_value(JobRecord, fields, "job")
    if "running_since" not in job and record.state is JobState.RUNNING:
        record.running_since = record.held_since
    return record
