"""Decides whether a job whose replicas have ended starts again at once, later, or never.

Pure: `controller` applies the decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pollux.controller.messages.events import GenerationEnded
from pollux.controller.state.lifecycle import JobState
from pollux.controller.state.records import JobRecord
from pollux.core import Reason

__all__ = ["MOST_LOSSES", "RetryDecision", "backoff_seconds", "decide_retry", "ran_well", "refusal_seconds"]

_FIRST_BACKOFF_SECONDS = 2.0
_LONGEST_BACKOFF_SECONDS = 300.0
# A backend may get free GPUs at any moment, but must not be asked too often.
_FIRST_REFUSAL_SECONDS = 1.0
_LONGEST_REFUSAL_SECONDS = 60.0
# After a run of this length, the pauses after crashes start again from the shortest.
_STEADY_SECONDS = 600.0

MOST_LOSSES = 10
"""A job fails after this many losses of replicas without progress in between."""


def backoff_seconds(streak: int) -> float:
    """The pause after this many crashes in a row: 2 s, doubled each time, at most 300 s."""
    exponent = min(max(streak - 1, 0), 30)
    return float(min(_FIRST_BACKOFF_SECONDS * 2.0**exponent, _LONGEST_BACKOFF_SECONDS))


def refusal_seconds(refusals: int) -> float:
    """The pause after this many refusals in a row: 1 s, doubled each time, at most 60 s."""
    exponent = min(max(refusals - 1, 0), 30)
    return float(min(_FIRST_REFUSAL_SECONDS * 2.0**exponent, _LONGEST_REFUSAL_SECONDS))


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The job's next state (queued or failed), why, and its counters from now on; see `JobRecord` for their meaning."""

    state: JobState
    reason: Reason
    detail: str
    crashes: int
    streak: int
    losses: int
    local_batch_max: int | None = None
    eligible_at: float | None = None
    refusals: int = 0


def decide_retry(record: JobRecord, event: GenerationEnded) -> RetryDecision:
    """The next state of a job whose generation has ended without success."""
    if event.outcome in ("crashed", "out-of-memory"):
        return _after_crash(record, event)
    if event.outcome == "lost":
        return _after_loss(record, event)
    if event.outcome == "refused":
        return _after_refusal(record, event)
    # The replicas ended without a command, say because a service stopped: start them again.
    reason = Reason("stopped", {"gpus_before": float(record.placement.num_gpus)})
    return replace(_requeue(record, reason), detail=record.detail)


def _requeue(record: JobRecord, reason: Reason, detail: str = "") -> RetryDecision:
    """The job waits again, with unchanged counters."""
    return RetryDecision(
        JobState.QUEUED, reason, detail, record.crashes, record.streak, record.losses, record.local_batch_max
    )


def _after_crash(record: JobRecord, event: GenerationEnded) -> RetryDecision:
    out_of_memory = event.outcome == "out-of-memory"
    crashes, retries = record.crashes + 1, record.spec.retries
    streak = 1 if ran_well(record, event) else record.streak + 1
    numbers = {"crashes": float(crashes), "retries": float(retries)}
    most = _smaller_batch(record) if out_of_memory else record.local_batch_max
    if out_of_memory and most is not None:
        numbers["local_batch_max"] = float(most)
    if crashes > retries:
        detail = _with(f"crashed {crashes} {'time' if crashes == 1 else 'times'}, {retries} forgiven", event.detail)
        reason = Reason(event.outcome, numbers)
        return RetryDecision(JobState.FAILED, reason, detail, crashes, streak, record.losses, most)
    numbers["backoff_seconds"] = pause = backoff_seconds(streak)
    reason = Reason("backoff-memory" if out_of_memory else "backoff", numbers)
    waits_until = event.at + pause
    return RetryDecision(
        JobState.QUEUED, reason, event.detail, crashes, streak, record.losses, most, eligible_at=waits_until
    )


def _after_loss(record: JobRecord, event: GenerationEnded) -> RetryDecision:
    progressed = record.is_beyond_loss(record.remaining, record.progress)
    losses = 1 if progressed or ran_well(record, event) else record.losses + 1
    reason = Reason("lost", {"losses": float(losses), "most_losses": float(MOST_LOSSES)})
    if losses < MOST_LOSSES:
        return replace(_requeue(record, reason, event.detail), losses=losses)
    detail = _with(f"its replicas were lost {losses} times without progress", event.detail)
    return replace(_requeue(record, reason, detail), state=JobState.FAILED, losses=losses)


def _after_refusal(record: JobRecord, event: GenerationEnded) -> RetryDecision:
    """Nothing was started, so this is no failure: the job waits, however often it is refused."""
    refusals = record.refusals + 1
    pause = refusal_seconds(refusals)
    reason = Reason("refused", {"refusals": float(refusals), "backoff_seconds": pause})
    return replace(_requeue(record, reason, event.detail), eligible_at=event.at + pause, refusals=refusals)


def ran_well(record: JobRecord, event: GenerationEnded) -> bool:
    """Whether the replicas ran long enough to show that they could run."""
    return event.at - record.held_since > _STEADY_SECONDS


def _smaller_batch(record: JobRecord) -> int | None:
    """Half of the local batch that did not fit in memory; None if it is not known."""
    request = record.spec.request
    asked = None if request is None else request.batch_size.per_gpu_max
    tried = next((most for most in (record.local_batch, record.local_batch_max, asked) if most is not None), None)
    return None if tried is None else max(tried // 2, 1)


def _with(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text
