"""Between a policy's answer and its effect: the answer is cut down to what it changes, and completed by what stays.

Pure; when a policy is asked is in `controller`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pollux.controller.state.records import JobRecord
from pollux.core import NOWHERE, Allocation, Change, Decision, Reason, Snapshot

__all__ = ["completed", "fallback_reason", "narrowed"]

# A waiting job's reason is written again only when a number moved by more than this share: the log would fill up.
_SAME = 0.05


def narrowed(active: Mapping[str, JobRecord], known: Mapping[str, JobRecord], decision: Decision) -> Decision:
    """Only jobs whose placement changes (NOWHERE for those that lose it), with reasons for them and for who waits.

    A waiting job's reason is left out where it is the one that is known already. Without the policy's memory.
    """
    # Jobs that nobody knows stay in, so that the check can say so.
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
    # The jobs that a reason names are examples of those in the way; while one of them still is, it need not change.
    if (before.jobs or reason.jobs) and not set(before.jobs) & set(reason.jobs):
        return True
    return not all(math.isclose(reason.numbers[name], before.numbers[name], rel_tol=_SAME) for name in before.numbers)


def completed(snapshot: Snapshot, decision: Decision, partial: bool, current: bool) -> Decision:
    """The answer as a whole allocation; one that is late is cut down to jobs that are still there."""
    allocation: Allocation = decision.allocation
    if not current:
        jobs = {job.id for job in snapshot.jobs}
        allocation = {job_id: placement for job_id, placement in allocation.items() if job_id in jobs}
    if partial:
        allocation = {**snapshot.running, **allocation}
    return decision if allocation is decision.allocation else replace(decision, allocation=allocation)


def fallback_reason(change: Change) -> Reason:
    """What can be said of a change that the policy gave no reason for: how many GPUs before and after."""
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
