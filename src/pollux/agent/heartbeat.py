"""Signs of life of the training thread, told by another thread; who reads them, and what silence means, is not here."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CHECKPOINT", "FIRST_STEP", "PASS_END", "REGROUP", "Heartbeat"]

FIRST_STEP = "first step"
CHECKPOINT = "checkpoint"
PASS_END = "pass end"
REGROUP = "regroup"
_EVERY_SECONDS = 1.0


class Heartbeat:
    """What the training thread is at: attributes that it sets, and that another thread looks at.

    `step` counts up as steps end. `busy` is a word while something takes long that is no step: a checkpoint, the first
    step, a regroup, the user's own code between passes (`PASS_END`). `waiting` says that the thread is where other
    replicas may hold it up, in a collective. A thread that is stuck elsewhere says nothing: of replicas that all stand
    still, the one that holds the others up is the silent one.
    """

    __slots__ = ("_every", "_last_at", "_last_step", "_wall", "busy", "step", "waiting")

    def __init__(self, every_seconds: float = _EVERY_SECONDS, wall: Callable[[], float] = time.time) -> None:
        self.step = -1
        self.busy = FIRST_STEP
        self.waiting = False
        self._every = every_seconds
        self._wall = wall
        self._last_at = float("-inf")
        self._last_step: int | None = None

    def due(self) -> dict[str, float | str | bool] | None:
        """A beat to tell now: at most one a second, and none where neither a step ended nor anything was announced."""
        now, step, busy, waiting = self._wall(), self.step, self.busy, self.waiting
        if now - self._last_at < self._every or (step == self._last_step and not busy and not waiting):
            return None
        self._last_at, self._last_step = now, step
        return {"step": step, "at": now, "busy": busy, "waiting": waiting}
