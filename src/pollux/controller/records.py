"""What is known of one job. How jobs are kept together is in `books`, what changes them in `controller`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pollux.controller.events import JobSpec
from pollux.controller.lifecycle import JobState
from pollux.core import NOWHERE, GoodputFunction, JobView, Placement, Reason

__all__ = ["JobRecord"]


@dataclass(slots=True)
class JobRecord:
    """All the controller knows of one job.

    Times are in seconds on the driver's clock, None for what has not happened. `held_since` is when it got, or lost,
    its present placement; `held_seconds` and `attained_gpu_seconds` are what it held up to then. `crashes` count
    against `spec.retries`; `streak` are those since it last ran well, and `losses` the times that its replicas vanished
    without progress in between. Until `eligible_at`, or while jobs of `waiting_for` have not succeeded, no policy is
    shown it. `local_batch` is the last one reported, `local_batch_max` what running out of memory has taught. `reason`
    says why it has what it has, since `reason_at`. `seen` and `written` are the last view and parts of the last state.
    """

    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    placement: Placement = NOWHERE
    generation: int = 0
    held_since: float = 0.0
    held_seconds: float = 0.0
    attained_gpu_seconds: float = 0.0
    num_starts: int = 0
    largest_gpus: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    detail: str = ""
    goodput: GoodputFunction | None = None
    remaining: float | None = None
    resize_cost_seconds: float = 30.0
    decided_goodput: float | None = None
    crashes: int = 0
    streak: int = 0
    losses: int = 0
    remaining_at_loss: float | None = None
    eligible_at: float | None = None
    local_batch: int | None = None
    local_batch_max: int | None = None
    waiting_for: tuple[str, ...] = ()
    reason: Reason | None = None
    reason_at: float | None = None
    seen: JobView | None = field(default=None, repr=False, compare=False)
    written: dict[str, tuple[object, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_restarts(self) -> int:
        """Times it was placed anew after its first start."""
        return max(self.num_starts - 1, 0)

    @property
    def is_ready(self) -> bool:
        """Whether a policy may place it, or leave it where it is."""
        return self.eligible_at is None and not self.waiting_for and self.state is not JobState.PAUSED

    def attained(self, now: float) -> float:
        """GPU-seconds held up to `now`."""
        return self.attained_gpu_seconds + self.placement.num_gpus * max(now - self.held_since, 0.0)

    def held(self, now: float) -> float:
        """Seconds up to `now` in which it held any GPUs: what a time limit counts."""
        return self.held_seconds + (max(now - self.held_since, 0.0) if self.placement else 0.0)

    def because(self, at: float, reason: Reason | None) -> None:
        """From now on, this is why it has what it has."""
        self.reason = reason
        self.reason_at = None if reason is None else at

    def view(self, now: float) -> JobView:
        """What a policy is shown; the same object as last time where nothing changed, see `forget_view`."""
        attained = self.attained(now)
        view = self.seen
        if view is None:
            spec = self.spec
            view = JobView(
                id=spec.id, submitted_at=self.submitted_at, limits=spec.limits,
                requested_gpus=spec.requested_gpus, weight=spec.weight, queue=spec.queue,
                attained_gpu_seconds=attained, num_restarts=self.num_restarts,
                largest_gpus=self.largest_gpus, resize_cost_seconds=self.resize_cost_seconds,
                goodput=self.goodput, remaining=self.remaining, oracle=spec.oracle,
            )  # fmt: skip
        elif view.attained_gpu_seconds != attained:
            view = replace(view, attained_gpu_seconds=attained)
        self.seen = view
        return view

    def forget_view(self) -> None:
        """Something that a policy sees has changed."""
        self.seen = None
