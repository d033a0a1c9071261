"""The states of a job and every legal step between them, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pollux.core import IllegalTransition

__all__ = ["ENDED", "HOLDING", "TRANSITIONS", "JobState", "step"]


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    RESIZING = "resizing"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
"""States without a next state."""

HOLDING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.RESIZING})
"""States in which a job holds GPUs."""

_WHILE_HOLDING = frozenset({JobState.QUEUED, JobState.PAUSED, JobState.RESIZING}) | ENDED

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    # A waiting job may end if it finished just when it was told to stop.
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.PAUSED}) | ENDED,
    # A starting job may be moved, preempted, or over before its first report arrives.
    JobState.STARTING: _WHILE_HOLDING | {JobState.RUNNING},
    JobState.RUNNING: _WHILE_HOLDING,
    JobState.RESIZING: _WHILE_HOLDING | {JobState.RUNNING},
    JobState.PAUSED: frozenset({JobState.QUEUED}) | ENDED,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""From each state, the states that may follow."""


def step(job_id: str, before: JobState, after: JobState, story: str = "") -> JobState:
    """`after`, if the table allows it; the error tells what the job could have done, and its `story` so far."""
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(TRANSITIONS[before])) or "nothing"
        state = f"{before} ({story})" if story else str(before)
        raise IllegalTransition(f"job '{job_id}' is {state} and cannot become {after}; it may become {allowed}")
    return after
