"""Gives a job its new placement, and returns the command for its backend that follows from it.

After a decision, before `service.engine.executor`, in every start and resize (docs/design/0016).
"""

from __future__ import annotations

from pollux.controller.machine.decisions import fallback_reason
from pollux.controller.messages.commands import Command, ResizeJob, StartJob, StopJob
from pollux.controller.state.cluster_state import ClusterState
from pollux.controller.state.lifecycle import JobState, step
from pollux.controller.state.records import JobRecord
from pollux.core import Change, Decision, Placement, Reason

__all__ = ["carry_out", "gpus_before", "gpus_before_and_after", "resize", "stop"]


def carry_out(cluster_state: ClusterState, change: Change, decision: Decision, at: float) -> Command:
    """Carry out one change of a decision: start, stop or resize the job."""
    job_id, record = change.job_id, cluster_state.jobs[change.job_id]
    cluster_state.place(record, change.after, at)
    record.forgive_moves(at)
    record.set_reason(at, decision.reasons.get(job_id) or fallback_reason(change))
    if change.kind == "stop":
        record.state = step(job_id, record.state, JobState.QUEUED)
        return StopJob(job_id, record.generation, change.before, "preempted")
    if change.kind == "start":
        record.state = step(job_id, record.state, JobState.STARTING)
        return StartJob(job_id, record.generation, change.after)
    record.state = step(job_id, record.state, JobState.RESIZING)
    return ResizeJob(job_id, record.generation, change.before, change.after)


def stop(record: JobRecord, before: Placement, reason: str) -> list[Command]:
    """The command to stop what a job had; none if it had nothing."""
    return [StopJob(record.spec.id, record.generation, before, reason)] if before else []


def resize(
    cluster_state: ClusterState, record: JobRecord, after: Placement, reason: Reason, detail: str, at: float
) -> Command:
    """Take GPUs from a job that goes on with the others, and return the command to resize it."""
    before = record.placement
    cluster_state.place(record, after, at)
    record.state = step(record.spec.id, record.state, JobState.RESIZING)
    record.detail = detail
    record.set_reason(at, reason)
    return ResizeJob(record.spec.id, record.generation, before, after)


def gpus_before(placement: Placement) -> dict[str, float]:
    """The number for the reason of a job that loses this placement."""
    return {"gpus_before": float(placement.num_gpus)}


def gpus_before_and_after(before: Placement, after: Placement) -> dict[str, float]:
    """The numbers for the reason of a job that changes its placement."""
    return {"gpus_before": float(before.num_gpus), "gpus_after": float(after.num_gpus)}
