"""Turns events of a backend into events for the controller."""

from __future__ import annotations

import math
from collections.abc import Callable

from pollux.backends.protocol import (
    BackendEvent,
    JobBackendEvent,
    NodeDown,
    NodeUp,
    ReplicasEnded,
    ReplicasLost,
    ReplicasStarted,
)
from pollux.controller import (
    ENDED,
    HOLDING,
    Controller,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobRecord,
    JobRunning,
    JobState,
    NodeAdded,
    NodeRemoved,
)
from pollux.controller.state.costs import LIVE_KINDS

__all__ = ["event_of", "is_late_end"]

ReportedDone = Callable[[str, int], bool]
"""Whether the last report of a job's generation said that it is done."""


def event_of(heard: BackendEvent, at: float, controller: Controller, reported_done: ReportedDone) -> Event | None:
    """The event for the controller; None if the controller knows it already, or it is about an earlier generation."""
    nodes = controller.cluster.by_id
    match heard:
        case NodeUp():
            return None if nodes.get(heard.node.id) == heard.node else NodeAdded(at, heard.node)
        case NodeDown():
            return NodeRemoved(at, heard.node_id) if heard.node_id in nodes else None
    record = _active_record(heard, controller) if isinstance(heard, JobBackendEvent) else None
    if record is None:
        return None
    match heard:
        case ReplicasStarted():
            return _started(heard, at, record)
        case ReplicasLost():
            return _lost(heard, at, record)
        case ReplicasEnded():
            return _ended(heard, at, record, reported_done)
    return None


def is_late_end(ended: ReplicasEnded, controller: Controller) -> bool:
    """Whether the job of these replicas has ended or was forgotten, so that the backend may forget it."""
    return _active_record(ended, controller) is None


def _active_record(heard: JobBackendEvent, controller: Controller) -> JobRecord | None:
    record = controller.jobs.get(heard.job_id)
    return None if record is None or record.state in ENDED else record


def _started(heard: ReplicasStarted, at: float, record: JobRecord) -> JobRunning | None:
    if heard.generation != record.generation or record.state not in (JobState.STARTING, JobState.RESIZING):
        return None
    return JobRunning(at, heard.job_id, heard.generation, *_pause_of(heard))


def _lost(heard: ReplicasLost, at: float, record: JobRecord) -> GenerationShrunk | None:
    is_current = heard.generation == record.generation and record.state in HOLDING
    if not is_current or heard.remaining == record.placement:
        return None
    return GenerationShrunk(
        at, heard.job_id, heard.generation, heard.remaining, heard.detail, heard.refused, heard.withdrawn
    )


def _ended(heard: ReplicasEnded, at: float, record: JobRecord, reported_done: ReportedDone) -> GenerationEnded | None:
    outcome = "succeeded" if _was_done(heard, reported_done) else heard.outcome
    if heard.generation != record.generation and outcome != "succeeded":
        return None
    return GenerationEnded(at, heard.job_id, heard.generation, outcome, heard.detail)


def _was_done(ended: ReplicasEnded, reported_done: ReportedDone) -> bool:
    """Whether a job that was told to stop had reported before that it is done."""
    succeeded = bool(ended.exits) and all(each.code == 0 for each in ended.exits)
    return ended.outcome == "stopped" and succeeded and reported_done(ended.job_id, ended.generation)


def _pause_of(started: ReplicasStarted) -> tuple[float | None, str]:
    """The pause of a live resize, if the replica reported a plausible number."""
    seconds = started.pause_seconds
    if not isinstance(seconds, int | float) or started.kind not in LIVE_KINDS:
        return None, ""
    return (float(seconds), started.kind) if math.isfinite(seconds) and seconds >= 0 else (None, "")
