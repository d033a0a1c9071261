"""Reduces a decision to its changes for the log, and completes it again before it is applied.

Pure; `decision_times` has when decisions are made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pollux.controller.state.records import JobRecord
from pollux.core import NOWHERE, Allocation, Change, Decision, Reason, Snapshot

__all__ = ["completed", "fallback_reason", "narrowed"]

# A waiting job's reason is logged again only if a number has changed by more than this share, to keep the log small.
_SAME = 0.05


def narrowed(active: Mapping[str, JobRecord], known: Mapping[str, JobRecord], decision: Decision) -> Decision:
    """Only jobs whose placement changes (NOWHERE for those that lose it), with reasons for them and for waiting jobs.

    The reason of a waiting job is left out if it is known already. The policy's memory is left out.
    """
    # Unknown jobs stay in, so that the check refuses them.
    allocation = {job_id: place for job_id, place in decision.allocation.items() if job_id not in known}
    for job_id, record in active.items():
        if record.is_ready and (after := decision.allocation.get(job_id, NOWHERE)) != record.placement:
            allocation[job_id] = after
    reasons = {
        job_id: reason
        for job_id, reason in decision.reasons.items()
        if job_id in allocation or (job_id in active and _is_new_to(active[job_id], reason))
    }
    return replace(decision, allocation=allocation, reasons=reasons, memory=None)


def _is_new_to(record: JobRecord, reason: Reason) -> bool:
    """Whether a waiting job's reason has changed enough to be written to the log."""
    before = record.reason
    if record.placement or not record.is_ready:
        return False
    if before is None or before.code != reason.code or before.numbers.keys() != reason.numbers.keys():
        return True
    # A reason names some jobs in the way; it stays while one of them is in the way.
    if (before.jobs or reason.jobs) and not set(before.jobs) & set(reason.jobs):
        return True
    return not all(math.isclose(reason.numbers[name], before.numbers[name], rel_tol=_SAME) for name in before.numbers)


def completed(snapshot: Snapshot, decision: Decision, partial: bool, current: bool) -> Decision:
    """The decision with a whole allocation, without jobs that are gone unless it is `current`."""
    allocation: Allocation = decision.allocation
    if not current:
        jobs = {job.id for job in snapshot.jobs}
        allocation = {job_id: placement for job_id, placement in allocation.items() if job_id in jobs}
    if partial:
        allocation = {**snapshot.running, **allocation}
    return decision if allocation is decision.allocation else replace(decision, allocation=allocation)


def fallback_reason(change: Change) -> Reason:
    """The reason of a change for which the policy gave none: the numbers of GPUs before and after."""
    before, after = change.before.num_gpus, change.after.num_gpus
    if not before:
        code = "started"
    elif not after:
        code = "preempted"
    elif before == after:
        code = "moved"
    else:
        code = "grew" if after > before else "shrank"
    return Reason(code, {"gpus_before": float(before), "gpus_after": float(after)})
