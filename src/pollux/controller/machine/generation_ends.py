"""Applies unsuccessful ends of a job's replicas: the job waits, starts again, goes on with fewer, or fails.

`retries` decides which; `returns` says how the job returns.
"""

from __future__ import annotations

from pollux.controller.machine import placing, returns
from pollux.controller.machine.reports import limited
from pollux.controller.machine.retries import RetryDecision, decide_retry
from pollux.controller.messages.commands import Command, StartJob
from pollux.controller.messages.events import GenerationEnded, GenerationOutcome, GenerationShrunk
from pollux.controller.state.cluster_state import ClusterState
from pollux.controller.state.lifecycle import HOLDING, JobState
from pollux.controller.state.records import JobRecord
from pollux.core import NOWHERE, InvalidInput, Placement, Reason

__all__ = ["failed", "shrunk"]


def failed(
    cluster_state: ClusterState, record: JobRecord, event: GenerationEnded, in_place: bool = True
) -> list[Command]:
    """All replicas of the job have ended, and the job is not finished.

    With `in_place`, a job whose live resize has failed starts again on the GPUs that it holds. Any other job loses its
    GPUs.
    """
    retry, before = decide_retry(record, event), record.placement
    moved = event.outcome == "lost" and record.is_resizing_live
    _note_failure(record, event, retry)
    if retry.state is JobState.FAILED:
        cluster_state.end(record, JobState.FAILED, event.at, retry.detail, retry.reason)
        # Lost replicas may still run where the backend cannot reach them.
        return placing.stop(record, before if event.outcome == "lost" else NOWHERE, "failed")
    record.eligible_at, record.detail = retry.eligible_at, retry.detail
    record.quiet_until = returns.quiet_until(record, event.at, retry)
    if moved and in_place:
        # A live resize has failed: start from the checkpoint on the same GPUs.
        cluster_state.renew(record, event.at)
        record.note_ready(event.at)
        record.set_reason(event.at, Reason("fell-back", placing.gpus_before(before)))
        return [StartJob(event.job_id, record.generation, record.placement)]
    cluster_state.requeue(record, event.at, retry.reason)
    if event.outcome != "refused":
        return []
    record.refusals = retry.refusals
    # Replicas of an earlier generation may still run.
    return placing.stop(record, before, "refused")


def _note_failure(record: JobRecord, event: GenerationEnded, retry: RetryDecision) -> None:
    """Count the failure in the job's record."""
    record.crashes, record.streak, record.losses = retry.crashes, retry.streak, retry.losses
    if event.outcome == "lost":
        record.note_loss(retry.losses)
        record.note_failed_move(event.at)
    if event.outcome == "out-of-memory":
        record.local_batch, record.local_batch_max = None, retry.local_batch_max
        record.goodput = limited(record.goodput, retry.local_batch_max)


def shrunk(cluster_state: ClusterState, event: GenerationShrunk) -> list[Command] | None:
    """Some replicas are lost. The job goes on with the others, which have its state, if they are enough.

    None if the event is of an earlier generation, or says nothing new.
    """
    record = cluster_state.jobs.get(event.job_id)
    if record is None or record.state not in HOLDING or event.generation != record.generation:
        return None
    after = event.placement
    if after == record.placement:
        return None
    _check_part(event, record.placement)
    ended = GenerationEnded(event.at, event.job_id, event.generation, _outcome_of(event), event.detail)
    retry = decide_retry(record, ended)
    if retry.state is JobState.FAILED or after.num_gpus < record.spec.limits.min_gpus:
        return _shrunk_too_far(cluster_state, record, event, ended, stops=retry.state is not JobState.FAILED)
    reason = _note_shrunk(record, event, retry)
    return [placing.resize(cluster_state, record, after, reason, event.detail, event.at)]


def _check_part(event: GenerationShrunk, before: Placement) -> None:
    after = event.placement
    if any(count > before.on(node) for node, count in after.shares):
        raise InvalidInput(f"job '{event.job_id}' shrank to '{after}', which is not a part of its '{before}'")


def _shrunk_too_far(
    cluster_state: ClusterState, record: JobRecord, event: GenerationShrunk, ended: GenerationEnded, stops: bool
) -> list[Command]:
    """The replicas that are left are too few, or the job has failed."""
    before = record.placement
    if event.withdrawn:
        record.note_failed_move(event.at)
    commands = failed(cluster_state, record, ended, in_place=False)
    # The other replicas wait for a command, except after a refusal, since they know of it.
    return [*placing.stop(record, before, ended.outcome), *commands] if stops and not event.refused else commands


def _outcome_of(event: GenerationShrunk) -> GenerationOutcome:
    """How the event counts: as a loss only if replicas that ran are gone."""
    if event.refused:
        return "refused"
    return "stopped" if event.withdrawn else "lost"


def _note_shrunk(record: JobRecord, event: GenerationShrunk, retry: RetryDecision) -> Reason:
    """Note in the record that the job goes on with fewer replicas; returns the reason for its placement."""
    numbers = placing.gpus_before_and_after(record.placement, event.placement)
    if event.refused:
        # It goes on; for a while it does not ask for these GPUs again.
        record.refusals, record.capped_until = retry.refusals, retry.eligible_at
        return Reason("refused", {**retry.reason.numbers, **numbers})
    record.live = True
    if not event.withdrawn:
        record.note_loss(retry.losses)
    record.note_failed_move(event.at)
    return Reason("replicas-lost", numbers)
