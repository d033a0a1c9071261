"""ETAs as times of day, and reasons as sentences."""

from __future__ import annotations

from collections.abc import Mapping

from pollux.controller import JobRecord
from pollux.controller.explanations.eta import EtaSeconds, eta
from pollux.controller.explanations.explain import explain
from pollux.core import Snapshot
from pollux.wire.status import Eta, ReasonStatus

__all__ = ["estimate", "explained", "times_of"]


def estimate(record: JobRecord, snapshot: Snapshot, jobs: Mapping[str, JobRecord] | None = None) -> Eta | None:
    """When the job is expected to end; None if unknown. `jobs` must have those that it must run after."""
    return times_of(eta(record, snapshot, jobs), snapshot.now)


def times_of(seconds: EtaSeconds | None, now: float) -> Eta | None:
    """Seconds left as times since 1970."""
    if seconds is None:
        return None
    current = None if seconds.current is None else now + seconds.current
    return Eta(now + seconds.low, now + seconds.high, current)


def explained(record: JobRecord) -> ReasonStatus | None:
    """Why a job has its GPUs, from the reason alone; None before the first decision about it."""
    reason = record.reason
    if reason is None or record.reason_at is None:
        return None
    text, next_step = explain(reason, record)
    return ReasonStatus(reason.code, record.reason_at, dict(reason.numbers), text, next_step, reason.jobs)
