"""How a job whose replicas have failed returns without moving other jobs again and again; pure.

A job that fails over and over would take GPUs from its neighbours at each start and give them back at each crash. So it
comes back once like any other job. When it fails again, it uses free GPUs only, for `RETURN_PERIOD_SECONDS`: the
snapshot limits it so that no policy takes GPUs from other jobs for it. See `retries` for pauses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pollux.controller.machine.retries import RetryDecision
from pollux.controller.state.records import JobRecord
from pollux.core import JobView, Reason, Snapshot
from pollux.policies.packing.capacity import Room

__all__ = ["RETURN_PERIOD_SECONDS", "quiet_until", "waits_reason", "within_free_room"]

RETURN_PERIOD_SECONDS = 300.0
"""After its first return, a job that keeps failing makes others give way at most once in this many seconds."""


def quiet_until(record: JobRecord, at: float, retry: RetryDecision) -> float | None:
    """Until when a job that has failed again may use free GPUs only; None if it may use others.

    The period begins when it got the GPUs on which it failed: others may have given way to it then.
    """
    again = retry.streak > 1 or retry.losses > 1 or retry.refusals > 1
    known = record.held_since + RETURN_PERIOD_SECONDS if again else at
    until = max(known, record.quiet_until or at)
    return until if until > at else None


def waits_reason(record: JobRecord, at: float) -> Reason | None:
    """Why a job whose pause is over still waits; None where policies are free to place it."""
    if record.quiet_until is None or record.placement:
        return None
    numbers = {"crashes": float(record.crashes), "wait_seconds": max(record.quiet_until - at, 0.0)}
    return Reason("backoff-free-gpus", numbers)


def within_free_room(snapshot: Snapshot, records: Iterable[JobRecord]) -> Snapshot:
    """The snapshot, in which jobs that came back after a failure may have only what they hold and free GPUs.

    Such a job is left out if these GPUs are fewer than its minimum.
    """
    quiet = {record.spec.id for record in records if record.quiet_until is not None}
    if not quiet:
        return snapshot
    room = Room(snapshot)
    for job in snapshot.jobs:
        room.take(job, snapshot.placement(job.id))
    shown = [job if job.id not in quiet else _capped(job, snapshot, room) for job in snapshot.jobs]
    return replace(snapshot, jobs=tuple(job for job in shown if job is not None))


def _capped(job: JobView, snapshot: Snapshot, room: Room) -> JobView | None:
    held, limits = snapshot.placement(job.id), job.limits
    room.give(job, held)
    most = max(room.most(job), held.num_gpus)
    room.take(job, held)
    if most < limits.min_gpus:
        return None
    return job if most >= limits.max_gpus else replace(job, limits=replace(limits, max_gpus=most))
