"""Signs of life of the training thread, told by another thread; who reads them, and what silence means, is not here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["CHECKPOINT", "FINISHED", "FIRST_STEP", "PASS_END", "REGROUP", "Heartbeat", "thread_clock"]

FIRST_STEP = "first step"
CHECKPOINT = "checkpoint"
PASS_END = "pass end"
REGROUP = "regroup"
FINISHED = "finished"
_EVERY_SECONDS = 1.0
# A thread that waits for something that never comes uses nothing at all.
_LEAST_WORK_SECONDS = 0.0005


def thread_clock() -> Callable[[], float]:
    """A clock of the processor time that the calling thread has used, for other threads to look at."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return lambda: 0.0
    clock = clock_of(threading.get_ident())
    return lambda: time.clock_gettime(clock)


class Heartbeat:
    """What the training thread is at: attributes that it sets, and that another thread looks at.

    `step` counts up as steps end. `busy` is a word while something takes long that is no step: a checkpoint, the first
    step, a regroup, the user's own code between passes (`PASS_END`) or after the last one (`FINISHED`). `waiting` says
    that the thread is where other replicas may hold it up, in a collective. A thread that computes something of the
    user's own, an evaluation say, is seen by `worked`, its processor time. One that is stuck elsewhere says nothing: of
    replicas that all stand still, the one that holds the others up is the silent one.
    """

    __slots__ = ("_every", "_last_at", "_last_step", "_last_work", "_wall", "_worked", "busy", "step", "waiting")

    def __init__(
        self,
        every_seconds: float = _EVERY_SECONDS,
        wall: Callable[[], float] = time.time,
        worked: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.step = -1
        self.busy = FIRST_STEP
        self.waiting = False
        self._every = every_seconds
        self._wall = wall
        self._last_at = float("-inf")
        self._last_step: int | None = None
        self._worked = worked
        self._last_work = worked()

    def due(self) -> dict[str, float | str | bool] | None:
        """A beat to tell now: at most one a second, and none where nothing happened and nothing was announced."""
        now, step, busy, waiting = self._wall(), self.step, self.busy, self.waiting
        if now - self._last_at < self._every:
            return None
        stands_still = step == self._last_step and self._worked() - self._last_work < _LEAST_WORK_SECONDS
        if stands_still and not busy and not waiting:
            return None
        return self._beat(now)

    def _beat(self, now: float) -> dict[str, float | str | bool]:
        self._last_at, self._last_step, self._last_work = now, self.step, self._worked()
        return {"step": self.step, "at": now, "busy": self.busy, "waiting": self.waiting}

    def last(self) -> dict[str, float | str | bool]:
        """The beat to tell now whatever was told before, since nobody may be there to tell another."""
        return self._beat(self._wall())
