"""Learning-rate schedulers that the script steps itself: found at the start, kept at the job's pace, saved and sent.

`Schedule` in `adaptation.progress` is for the scheduler that the script hands over.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.checkpoint.save_request import check_pickling
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.core.errors import InvalidInput

__all__ = ["ScriptSchedule", "ScriptSchedules", "script_schedules"]

_log = logging.getLogger("pollux")


class ScriptSchedule:
    """One scheduler of the script. A call of its `step()` counts as the same call of a run at the initial batch.

    Outside of `job.batches()` a call is one call. Inside, it counts once for a whole optimiser step and not for each
    of its micro-batches; in adaptive mode it then counts as often as an exact run would have called it for the same
    progress. A scheduler that looks at a metric gets the mean over replicas. Calls that name an epoch pass unchanged.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.name = type(scheduler).__name__
        self._plain = type(scheduler)
        self._pace: Callable[[ScriptSchedule], int] | None = None
        self._replicas: ReplicaGroup | None = None
        self.at_step = 0
        self.at_due = 0
        self.left_over = 0.0

    def follow(self, pace: Callable[[ScriptSchedule], int], replicas: ReplicaGroup) -> None:
        """Route the script's calls of `step()` through here; `pace` says how often each counts."""
        self._pace, self._replicas = pace, replicas
        # Not an attribute of the scheduler: its state has all attributes.
        self.scheduler.__class__ = _followed(self._plain)
        _OWNERS[self.scheduler] = self

    def release(self) -> None:
        """Give the scheduler back as it was."""
        if _OWNERS.pop(self.scheduler, None) is not None:
            self.scheduler.__class__ = self._plain

    def step(self, plain: Callable[..., None], args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """What a call of `step()` does now."""
        count = 1 if self._pace is None else self._pace(self)
        if isinstance(self.scheduler, ReduceLROnPlateau) and self._replicas is not None:
            if count:
                metric = args[0] if args else named.pop("metrics")
                plain(float(self._replicas.gather([float(metric)]).mean()), *args[1:], **named)
            return
        if args or named:
            count = min(count, 1)
        for _ in range(count):
            plain(*args, **named)

    def can_be_saved(self) -> bool:
        """Whether its state can be saved; a warning where it cannot."""
        try:
            check_pickling({self.name: self.state_dict()})
        except InvalidInput as error:
            _log.warning(
                "the script steps a scheduler that starts from its beginning after a resume and on replicas that join, "
                "since its state cannot be saved: %s", error,
            )  # fmt: skip
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and where its last call was."""
        pace = {"step": self.at_step, "due": self.at_due, "left_over": self.left_over}
        return {"scheduler": self.scheduler.state_dict(), "pace": pace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.scheduler.load_state_dict(state["scheduler"])
        pace = state["pace"]
        self.at_step, self.at_due, self.left_over = int(pace["step"]), int(pace["due"]), float(pace["left_over"])


_OWNERS: weakref.WeakKeyDictionary[LRScheduler, ScriptSchedule] = weakref.WeakKeyDictionary()
_FOLLOWED: dict[type, type] = {}


def _followed(plain: type[LRScheduler]) -> type:
    """The scheduler's class with a `step` that asks its owner first; it has the same name."""
    if plain not in _FOLLOWED:

        def step(self: LRScheduler, *args: Any, **named: Any) -> None:
            owner, own = _OWNERS.get(self), plain.step.__get__(self)
            if owner is None:
                own(*args, **named)
            else:
                owner.step(own, args, named)

        body = {"step": step, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
        _FOLLOWED[plain] = type(plain.__name__, (plain,), body)
    return _FOLLOWED[plain]


def script_schedules(
    optimizer: torch.optim.Optimizer, handed_over: object, saved: Collection[object]
) -> tuple[tuple[ScriptSchedule, ...], dict[str, ScriptSchedule]]:
    """The schedulers of this optimiser that the script has made and keeps, and those that nobody saves, by name.

    `handed_over` is the scheduler that the job steps, `saved` are the objects that the script asks to have saved.
    """
    # By type: `isinstance` asks an object for its class, and some answer with a warning.
    known = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler)]
    found = [each for each in known if getattr(each, "optimizer", None) is optimizer]
    # A scheduler of schedulers steps those inside it.
    inner = {id(each) for outer in found for each in getattr(outer, "_schedulers", ())}
    schedules = tuple(ScriptSchedule(each) for each in found if each is not handed_over and id(each) not in inner)
    kept = {id(each) for each in saved}
    unsaved = [each for each in schedules if id(each.scheduler) not in kept and each.can_be_saved()]
    return schedules, {f"script.lr_scheduler.{number}": each for number, each in enumerate(unsaved)}


class ScriptSchedules:
    """The script's schedulers at the pace of the job; `in_batches` says that the script is inside `job.batches()`."""

    def __init__(
        self,
        schedules: Sequence[ScriptSchedule],
        progress: TrainingProgress,
        initial_batch: int,
        exact: bool,
        replicas: ReplicaGroup,
    ) -> None:
        self._schedules = tuple(schedules)
        self._progress = progress
        self._initial = initial_batch
        self._exact = exact
        self._is_mid_step: Callable[[], bool] = lambda: False
        self.in_batches = False
        for each in self._schedules:
            each.follow(self._count, replicas)

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds of these schedulers, for messages."""
        return tuple(each.name for each in self._schedules)

    def attach(self, is_mid_step: Callable[[], bool]) -> None:
        """`is_mid_step` says whether the present micro-batch is not the last of its step, or its step was dropped."""
        self._is_mid_step = is_mid_step

    def _count(self, schedule: ScriptSchedule) -> int:
        if not self.in_batches:
            return 1
        if self._is_mid_step():
            return 0
        if self._exact:
            return 1
        steps, due = self._progress.steps, self._progress.steps_due(self._initial)
        steps_between, calls_due = steps - schedule.at_step, due - schedule.at_due
        schedule.at_step, schedule.at_due = steps, due
        if steps_between <= 0:
            return 1
        # A script that calls every k-th step calls as often again per step of the initial batch.
        calls = calls_due / steps_between + schedule.left_over
        count = max(math.floor(calls + 1e-9), 0)
        schedule.left_over = max(calls - count, 0.0)
        return count

    def close(self) -> None:
        """Give the schedulers back."""
        for each in self._schedules:
            each.release()
