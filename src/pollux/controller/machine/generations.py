"""What the end of a generation's replicas means for their job: again at once, again later, or never.

Pure: a verdict comes out, and `controller` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pollux.controller.messages.events import GenerationEnded
from pollux.controller.state.lifecycle import JobState
from pollux.controller.state.records import JobRecord
from pollux.core import Reason

__all__ = ["MOST_LOSSES", "Verdict", "backoff_seconds", "judge", "refusal_seconds"]

_FIRST_BACKOFF_SECONDS = 2.0
_LONGEST_BACKOFF_SECONDS = 300.0
# An engine that lends nothing now may do so any moment, and must not be asked without end.
_FIRST_REFUSAL_SECONDS = 1.0
_LONGEST_REFUSAL_SECONDS = 60.0
# Who ran this long was not broken from the start: its next pause is a short one again.
_STEADY_SECONDS = 600.0

MOST_LOSSES = 10
"""After so many losses of its replicas without progress in between, a job is given up."""


def backoff_seconds(streak: int) -> float:
    """The pause after the crash of this number in a row: 2 s, doubled each time, at most 300 s."""
    exponent = min(max(streak - 1, 0), 30)
    return float(min(_FIRST_BACKOFF_SECONDS * 2.0**exponent, _LONGEST_BACKOFF_SECONDS))


def refusal_seconds(refusals: int) -> float:
    """The pause after the refusal of this number in a row: 1 s, doubled each time, at most 60 s."""
    exponent = min(max(refusals - 1, 0), 30)
    return float(min(_FIRST_REFUSAL_SECONDS * 2.0**exponent, _LONGEST_REFUSAL_SECONDS))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job's next state (queued or failed), why, and its counters from now on; see `JobRecord` for their meaning."""

    state: JobState
    reason: Reason
    detail: str
    crashes: int
    streak: int
    losses: int
    eligible_at: float | None = None
    local_batch_max: int | None = None
    refusals: int = 0


def judge(record: JobRecord, event: GenerationEnded) -> Verdict:
    """What follows from the end, not a good one, of the generation that the job holds GPUs for."""
    if event.outcome in ("crashed", "out-of-memory"):
        return _crashed(record, event)
    if event.outcome == "lost":
        return _lost(record, event)
    if event.outcome == "refused":
        return _refused(record, event)
    # Replicas that were stopped though nobody said so here, such as by a service that went down: start them again.
    reason = Reason("stopped", {"gpus_before": float(record.placement.num_gpus)})
    return Verdict(
        JobState.QUEUED, reason, record.detail, record.crashes, record.streak, record.losses,
        local_batch_max=record.local_batch_max,
    )  # fmt: skip


def _crashed(record: JobRecord, event: GenerationEnded) -> Verdict:
    crashes, retries = record.crashes + 1, record.spec.retries
    streak = 1 if _ran_well(record, event) else record.streak + 1
    numbers = {"crashes": float(crashes), "retries": float(retries)}
    most = record.local_batch_max
    if event.outcome == "out-of-memory":
        most = _smaller_batch(record)
        if most is not None:
            numbers["local_batch_max"] = float(most)
    if crashes > retries:
        code = "crashed" if event.outcome == "crashed" else "out-of-memory"
        detail = _with(f"crashed {crashes} {_times(crashes)}, {retries} forgiven", event.detail)
        return Verdict(
            JobState.FAILED, Reason(code, numbers), detail, crashes, streak, record.losses, local_batch_max=most
        )
    pause = backoff_seconds(streak)
    numbers["backoff_seconds"] = pause
    code = "backoff" if event.outcome == "crashed" else "backoff-memory"
    return Verdict(
        JobState.QUEUED, Reason(code, numbers), event.detail, crashes, streak, record.losses,
        eligible_at=event.at + pause, local_batch_max=most,
    )  # fmt: skip


def _lost(record: JobRecord, event: GenerationEnded) -> Verdict:
    progressed = record.is_beyond_loss(record.remaining, record.progress)
    losses = 1 if progressed or _ran_well(record, event) else record.losses + 1
    numbers = {"losses": float(losses), "most_losses": float(MOST_LOSSES)}
    state, detail = JobState.QUEUED, event.detail
    if losses >= MOST_LOSSES:
        state = JobState.FAILED
        detail = _with(f"its replicas were lost {losses} times without progress", event.detail)
    return Verdict(
        state, Reason("lost", numbers), detail, record.crashes, record.streak, losses,
        local_batch_max=record.local_batch_max,
    )  # fmt: skip


def _refused(record: JobRecord, event: GenerationEnded) -> Verdict:
    """Nothing was started, so nothing failed: it waits, however often that happens."""
    refusals = record.refusals + 1
    pause = refusal_seconds(refusals)
    numbers = {"refusals": float(refusals), "backoff_seconds": pause}
    return Verdict(
        JobState.QUEUED, Reason("refused", numbers), event.detail, record.crashes, record.streak, record.losses,
        eligible_at=event.at + pause, local_batch_max=record.local_batch_max, refusals=refusals,
    )  # fmt: skip


def _ran_well(record: JobRecord, event: GenerationEnded) -> bool:
    return event.at - record.held_since > _STEADY_SECONDS


def _smaller_batch(record: JobRecord) -> int | None:
    """Half of the local batch that did not fit; None where nobody has said what that was."""
    request = record.spec.request
    asked = None if request is None else request.batch_size.per_gpu_max
    tried = next((most for most in (record.local_batch, record.local_batch_max, asked) if most is not None), None)
    return None if tried is None else max(tried // 2, 1)


def _with(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text


def _times(count: int) -> str:
    return "time" if count == 1 else "times"
