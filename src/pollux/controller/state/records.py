"""The record of one job, with the rule for a live resize or a restart, `JobRecord.moves_live`.

`cluster_state` keeps all records, `controller` changes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from pollux.controller.messages.events import JobSpec
from pollux.controller.messages.kinds import default_kind
from pollux.controller.state.costs import RESTART, Costs, likely_seconds, with_pause
from pollux.controller.state.lifecycle import JobState
from pollux.core import NOWHERE, GoodputFunction, JobLimits, JobView, Placement, Prior, Reason

__all__ = ["FORGIVEN_AFTER_SECONDS", "MOST_FAILED_MOVES", "JobRecord"]

MOST_FAILED_MOVES = 3
"""After this many failed live resizes, a job is resized by restarts."""

_MEASURED_FROM = (
    "started_at", "running_since", "eligible_at", "capped_until", "quiet_until", "failed_move_at", "reason_at",
    "hidden_since",
)  # fmt: skip
"""Times of a record that a skip of the clock moves later, unless None."""

_MOST_LOSSES = 32

FORGIVEN_AFTER_SECONDS = 3600.0
"""This long after the last failure, a live resize is tried again."""


@dataclass(slots=True)
class JobRecord:
    """All the controller knows of one job.

    Times are in seconds on the driver's clock; None for what has not happened.

    - `held_since`: when it got, or lost, its present placement. `attained_gpu_seconds`: what it had held by then.
    - `running_since`: since when all replicas of its generation run, None while they do not. `held_seconds`: how long
      its replicas had run before that.
    - `crashes` count against `spec.retries`; `streak` is the number of crashes since it last ran well. `losses` is how
      often its replicas were lost without progress in between; `remaining_at_loss` and `progress_at_loss` are what was
      known at the last loss.
    - Policies see the job from `eligible_at` on, once all jobs of `waiting_for` have succeeded. `refusals` is how often
      in a row the backend did not have the job's GPUs. Until `capped_until`, policies see the GPUs that it holds as its
      maximum.
    - `hidden_since`: since when policies do not see it, None while they do; `hidden_seconds`: for how long before that.
    - Until `quiet_until` it uses free GPUs only, since it has failed again; see `machine/returns.py`.
    - `local_batch` is the last one reported, `local_batch_max` the limit found by running out of memory.
    - `live`: whether its agent can follow a live resize, None while that is not known. `failed_moves`: how many live
      resizes failed since the last that succeeded, the newest at `failed_move_at`.
    - `aged_since`: from when the age of an ended job counts, None for `ended_at`; later if the clock has skipped time
      since, or the service was away.
    - `loss_history`, `utilization` and `memory_bytes` are what it reported, as in `JobView`.
    - `costs` are its pauses by kind, `last_pause` the newest. `reason` says why it has its GPUs, since `reason_at`.
    - `seen` and `written` are the last view, and parts of the last saved state.
    """

    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    placement: Placement = NOWHERE
    generation: int = 0
    held_since: float = 0.0
    held_seconds: float = 0.0
    running_since: float | None = None
    attained_gpu_seconds: float = 0.0
    num_starts: int = 0
    largest_gpus: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    detail: str = ""
    goodput: GoodputFunction | None = None
    remaining: float | None = None
    progress: float | None = None
    resize_cost_seconds: float = 30.0
    decided_goodput: float | None = None
    crashes: int = 0
    streak: int = 0
    losses: int = 0
    remaining_at_loss: float | None = None
    progress_at_loss: float | None = None
    eligible_at: float | None = None
    refusals: int = 0
    capped_until: float | None = None
    quiet_until: float | None = None
    hidden_since: float | None = None
    hidden_seconds: float = 0.0
    local_batch: int | None = None
    local_batch_max: int | None = None
    waiting_for: tuple[str, ...] = ()
    live: bool | None = None
    failed_moves: int = 0
    failed_move_at: float | None = None
    costs: Costs = field(default_factory=dict)
    last_pause: tuple[str, float] | None = None
    loss_history: tuple[tuple[float, float], ...] = ()
    utilization: float | None = None
    memory_bytes: float | None = None
    reason: Reason | None = None
    reason_at: float | None = None
    aged_since: float | None = None
    seen: JobView | None = field(default=None, repr=False, compare=False)
    written: dict[str, tuple[object, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The kind in its spec, else `default_kind` of its command, or ''. Jobs of one kind should be alike."""
        request = self.spec.request
        return self.spec.kind or ("" if request is None else default_kind(request.run))

    @property
    def work(self) -> str:
        """What jobs with the same work to do have in common: the whole command, '' if it has none."""
        return "" if self.spec.request is None else " ".join(self.spec.request.run)

    @property
    def num_restarts(self) -> int:
        """How often its GPUs changed, or it was started again, after its first start."""
        return max(self.num_starts - 1, 0)

    def is_over(self, before: float) -> bool:
        """Whether it ended before that time; time that the clock has skipped since does not count."""
        return self.ended_at is not None and max(self.ended_at, self.aged_since or self.ended_at) < before

    @property
    def is_ready(self) -> bool:
        """Whether policies see it."""
        return self.eligible_at is None and not self.waiting_for and self.state is not JobState.PAUSED

    def note_ready(self, at: float) -> None:
        """Note that policies see it from `at` on, or do not see it any more; call it after what `is_ready` reads."""
        if not self.is_ready:
            self.hidden_since = at if self.hidden_since is None else self.hidden_since
        elif self.hidden_since is not None:
            self.hidden_seconds += max(at - self.hidden_since, 0.0)
            self.hidden_since = None
            self.forget_view()

    @property
    def moves_live(self) -> bool:
        """The rule for live resize or restart. True: its next resize is tried live, False: it is done by a restart.

        It is tried live if the job allows and can follow live resizes, and they have not failed too often. A job that
        has not reported `live` is assumed able; its shim restarts it if it cannot. `service.engine.executor`
        sends each resize by this rule.
        """
        return self._is_able_to_move and self.failed_moves < MOST_FAILED_MOVES

    @property
    def _is_able_to_move(self) -> bool:
        """Whether the job allows live resizes, and no report says that it cannot follow them."""
        request = self.spec.request
        return bool(self.live) if request is None else request.allows_live and self.live is not False

    @property
    def is_resizing_live(self) -> bool:
        """Whether a live resize of it is under way now; `moves_live` is about the next one."""
        return self.state is JobState.RESIZING and self._is_able_to_move

    @property
    def likely_kind(self) -> str:
        """How its next resize will be done: `live` or `restart`."""
        return "live" if self.moves_live else RESTART

    def is_beyond_loss(self, remaining: float | None, progress: float | None) -> bool:
        """Whether these numbers show progress beyond what was known at its last loss."""
        less = remaining is not None and self.remaining_at_loss is not None and remaining < self.remaining_at_loss
        more = progress is not None and self.progress_at_loss is not None and progress > self.progress_at_loss
        return less or more

    def note_loss(self, losses: int) -> None:
        """Note that replicas were lost; `losses` is the number of losses from now on."""
        self.losses, self.remaining_at_loss = losses, self.remaining
        known = [progress for progress in (self.progress, self.progress_at_loss) if progress is not None]
        # The largest progress: a job that reaches the same point again and again makes none.
        self.progress_at_loss = max(known, default=None)

    def note_pause(self, kind: str, seconds: float) -> None:
        """Note what its last resize cost; the same pause reported again counts once."""
        if not kind:
            self.resize_cost_seconds = seconds
            return
        if self.last_pause != (kind, seconds):
            self.last_pause = kind, seconds
            self.costs = with_pause(self.costs, kind, seconds)
            if kind != RESTART:
                self.live, self.failed_moves = True, 0
        self.estimate_cost()

    def note_failed_move(self, at: float) -> None:
        """Note that a live resize, if there was one, failed. A job that has not reported `live` is then not live."""
        if not self.is_resizing_live:
            return
        self.failed_moves, self.failed_move_at = self.failed_moves + 1, at
        self.live = bool(self.live)
        self.estimate_cost()

    def forgive_moves(self, at: float) -> None:
        """Allow live resizes again if the last failure is long ago."""
        since = self.failed_move_at
        if self.failed_moves >= MOST_FAILED_MOVES and (since is None or at - since >= FORGIVEN_AFTER_SECONDS):
            self.failed_moves = 0
            self.estimate_cost()

    def estimate_cost(self) -> None:
        """Estimate what the next resize will cost, from what is known now."""
        failed = self.failed_moves / MOST_FAILED_MOVES
        self.resize_cost_seconds = likely_seconds(self.costs, self.moves_live, self.spec.resize_cost_seconds, failed)
        self.forget_view()

    def note_loss_value(self, loss: float) -> None:
        """Note a loss value that it reported, with its useful samples so far; the last value for a number counts."""
        at = self.progress or 0.0
        before = self.loss_history[:-1] if self.loss_history and self.loss_history[-1][0] == at else self.loss_history
        self.loss_history = (*before, (at, loss))[-_MOST_LOSSES:]

    def attained(self, now: float) -> float:
        """GPU-seconds held up to `now`."""
        return self.attained_gpu_seconds + self.placement.num_gpus * max(now - self.held_since, 0.0)

    def running_seconds(self, now: float) -> float:
        """Seconds up to `now` in which its replicas ran, which a time limit counts; waiting does not count."""
        return self.held_seconds + (0.0 if self.running_since is None else max(now - self.running_since, 0.0))

    def note_run(self, at: float, seconds: float) -> None:
        """Note how long the replicas of its generation have run by `at`; other time on the clock does not count.

        Nothing is noted while some of them do not run, or if `seconds` is negative or infinite.
        """
        if self.running_since is None or not 0.0 <= seconds < math.inf:
            return
        since = at - seconds
        if since > self.running_since:
            # No GPUs were held in the other time: the machine was off, or the clock wrong.
            self.held_since = min(self.held_since + since - self.running_since, at)
            self.forget_view()
        self.running_since = since

    def skip(self, seconds: float) -> None:
        """Move the starts of all durations later by the seconds that the clock skipped."""
        self.submitted_at += seconds
        self.held_since += seconds
        for name in _MEASURED_FROM:
            at = getattr(self, name)
            if at is not None:
                setattr(self, name, at + seconds)
        self.forget_view()

    def set_reason(self, at: float, reason: Reason | None) -> None:
        """Set why it has the GPUs it has, from `at` on."""
        self.reason = reason
        self.reason_at = None if reason is None else at

    def view(self, now: float, prior: Prior | None = None) -> JobView:
        """The job as policies see it; the same object as last time if nothing has changed, see `forget_view`."""
        attained = self.attained(now)
        view = self.seen
        if view is None:
            spec = self.spec
            view = JobView(
                id=spec.id, submitted_at=self.submitted_at, limits=self._shown_limits(),
                requested_gpus=spec.requested_gpus, weight=spec.weight, queue=spec.queue,
                attained_gpu_seconds=attained, num_restarts=self.num_restarts,
                largest_gpus=self.largest_gpus, resize_cost_seconds=self.resize_cost_seconds,
                goodput=self.goodput, remaining=self.remaining, oracle=spec.oracle,
                kind=self.kind, group=spec.group, deadline=spec.deadline, loss_history=self.loss_history,
                utilization=self.utilization, memory_bytes=self.memory_bytes, prior=prior, crashes=self.streak,
                hidden_seconds=self.hidden_seconds,
            )  # fmt: skip
        elif view.attained_gpu_seconds != attained or view.prior is not prior:
            view = replace(view, attained_gpu_seconds=attained, prior=prior)
        self.seen = view
        return view

    def _shown_limits(self) -> JobLimits:
        limits, held = self.spec.limits, self.placement.num_gpus
        if self.capped_until is None or not limits.min_gpus <= held < limits.max_gpus:
            return limits
        return replace(limits, max_gpus=held)

    def forget_view(self) -> None:
        """Drop the last view: something that a policy sees has changed."""
        self.seen = None
