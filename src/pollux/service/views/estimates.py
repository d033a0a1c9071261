"""The controller's numbers in the form for people: times of day instead of seconds left, sentences for reasons."""

from __future__ import annotations

from collections.abc import Mapping

from pollux.controller import JobRecord
from pollux.controller.explanations.eta import EtaSeconds, eta
from pollux.controller.explanations.explain import explain
from pollux.core import Snapshot
from pollux.wire.status import Eta, ReasonStatus

__all__ = ["estimate", "explained", "times_of"]


def estimate(record: JobRecord, snapshot: Snapshot, jobs: Mapping[str, JobRecord] | None = None) -> Eta | None:
    """When the job is expected to end; None where that is not known. `jobs` must hold those that it follows."""
    return times_of(eta(record, snapshot, jobs), snapshot.now)


def times_of(seconds: EtaSeconds | None, now: float) -> Eta | None:
    """Seconds left as times since 1970."""
    if seconds is None:
        return None
    current = None if seconds.current is None else now + seconds.current
    return Eta(now + seconds.low, now + seconds.high, current)


def explained(record: JobRecord) -> ReasonStatus | None:
    """Why a job has what it has, in words made of the reason alone; None before the first decision about it."""
    reason = record.reason
    if reason is None or record.reason_at is None:
        return None
    text, next_step = explain(reason, record)
    return ReasonStatus(reason.code, record.reason_at, dict(reason.numbers), text, next_step, reason.jobs)
