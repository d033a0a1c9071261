"""A job's samples, progress and epochs, and its place in the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any, Protocol

from pollux.core.errors import MisusedJob

__all__ = ["SCHEDULE_UNITS", "Schedule", "TrainingProgress"]

SCHEDULE_UNITS = ("step", "epoch")
_SLACK = 1e-9


class _Scheduler(Protocol):
    def step(self) -> None: ...


class TrainingProgress:
    """Progress is Σ samples·efficiency over all steps, in samples at the initial batch M0.

    An *epoch* is `epoch_size` of progress; at the initial batch, one pass over the data. `epoch_size` is None while it
    is not known (a stream on its first pass); then the end of the pass ends the epoch.
    """

    def __init__(self, epoch_size: int | None) -> None:
        self.epoch_size = epoch_size
        self.steps = 0
        self.samples = 0
        self.progress = 0.0
        self.epoch = 0
        self.epoch_began = 0.0

    def add(self, samples: int, efficiency: float) -> None:
        """Count an optimiser step of so many samples."""
        self.steps += 1
        self.samples += samples
        self.progress += samples * efficiency

    @property
    def in_epoch(self) -> float:
        """Progress since the current epoch began."""
        return self.progress - self.epoch_began

    @property
    def epoch_reached(self) -> bool:
        """Whether the progress of the current epoch is complete; false while the size of an epoch is not known."""
        return self.epoch_size is not None and self.in_epoch >= self.epoch_size * (1.0 - _SLACK)

    @property
    def epochs(self) -> float:
        """Progress in epochs."""
        return self.epoch + (self.in_epoch / self.epoch_size if self.epoch_size else 0.0)

    def scheduled_steps(self, initial_batch: int) -> int:
        """How many steps a per-step schedule should have taken by now.

        An epoch counts as the steps that it has at the initial batch.
        """
        if not self.epoch_size:
            return math.floor(self.progress / initial_batch + _SLACK)
        return math.floor(self.epochs * math.ceil(self.epoch_size / initial_batch) + _SLACK)

    def steps_due(self, initial_batch: int) -> int:
        """`scheduled_steps`, but never past the end of this epoch: progress beyond it counts in the next one."""
        due = self.scheduled_steps(initial_batch)
        if self.epoch_size is None:
            return due
        return min(due, (self.epoch + 1) * math.ceil(self.epoch_size / initial_batch))

    def close_epoch(self) -> None:
        """Start the next epoch. Progress beyond the end of this one counts for the next; a shortfall is dropped."""
        reached = self.epoch_reached and self.epoch_size is not None
        self.epoch_began = self.epoch_began + (self.epoch_size or 0) if reached else self.progress
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: getattr(self, name) for name in ("steps", "samples", "progress", "epoch", "epoch_began", "epoch_size")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.steps, self.samples, self.epoch = int(state["steps"]), int(state["samples"]), int(state["epoch"])
        self.progress, self.epoch_began = float(state["progress"]), float(state["epoch_began"])
        if self.epoch_size is None and state["epoch_size"] is not None:
            self.epoch_size = int(state["epoch_size"])


class Schedule:
    """A learning-rate scheduler of PyTorch's, advanced by progress: a decay at epoch 60 stays at epoch 60.

    By `step`, the scheduler advances in an epoch as often as there are optimiser steps at the initial batch; in exact
    mode, at each optimiser step. By `epoch`, it advances once per epoch.
    """

    def __init__(self, scheduler: _Scheduler, unit: str, initial_batch: int, exact: bool) -> None:
        self.scheduler = scheduler
        self.unit = unit
        self._initial = initial_batch
        self._exact = exact
        self._taken = 0
        self._left_at: int | None = None

    @property
    def taken(self) -> int:
        """How often it has advanced; set where a state is restored."""
        return self._taken

    @taken.setter
    def taken(self, taken: int) -> None:
        self._taken, self._left_at = taken, None

    def after_step(self, progress: TrainingProgress) -> None:
        """Advance a schedule by step to the present progress."""
        if self.unit != "step":
            return
        self._advance(self.taken + 1 if self._exact else progress.steps_due(self._initial))

    def after_epoch(self) -> None:
        """Advance a schedule by epoch."""
        if self.unit == "epoch":
            self._advance(self.taken + 1)

    def _advance(self, due: int) -> None:
        found = getattr(self.scheduler, "last_epoch", None)
        if self._left_at is not None and found != self._left_at:
            raise MisusedJob(
                f"the learning-rate scheduler is at {found}, not at {self._left_at}: the job advances it, so take "
                "scheduler.step() out of the script"
            )
        while self._taken < due:
            self.scheduler.step()
            self._taken += 1
        self._left_at = getattr(self.scheduler, "last_epoch", None)
