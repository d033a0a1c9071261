"""Applies the ends of pauses and restrictions after failures, and of time limits."""

from __future__ import annotations

from pollux.controller.machine import placing, returns
from pollux.controller.messages.commands import Command
from pollux.controller.state.cluster_state import ClusterState, time_up
from pollux.controller.state.lifecycle import JobState
from pollux.controller.state.records import JobRecord
from pollux.core import Reason

__all__ = ["fired"]


def fired(cluster_state: ClusterState, at: float) -> list[Command] | None:
    """Apply all that is due at `at`, and return the commands; None if nothing was due and nothing has changed."""
    due = cluster_state.due(at)
    commands: list[Command] = []
    for record in due:
        limit = time_up(record)
        if limit is not None and limit <= at:
            commands += _time_is_up(cluster_state, record, at)
            continue
        _end_pauses(record, at)
        cluster_state.note_due_time(record)
    return commands if due else None


def _end_pauses(record: JobRecord, at: float) -> None:
    """End a job's restrictions after failures if their time is over."""
    if record.quiet_until is not None and record.quiet_until <= at:
        record.quiet_until = None
    if record.capped_until is not None and record.capped_until <= at:
        record.capped_until = None
        record.forget_view()
    if record.eligible_at is not None and record.eligible_at <= at:
        record.eligible_at = None
        record.note_ready(at)
        if (reason := returns.waits_reason(record, at)) is not None:
            record.set_reason(at, reason)


def _time_is_up(cluster_state: ClusterState, record: JobRecord, at: float) -> list[Command]:
    before, limit = record.placement, record.spec.time_limit_seconds or 0.0
    numbers = {"limit_seconds": limit, "held_seconds": record.running_seconds(at)}
    detail = f"time limit of {limit:g} s reached"
    cluster_state.end(record, JobState.FAILED, at, detail, Reason("time-limit", numbers))
    return placing.stop(record, before, "time-limit")
