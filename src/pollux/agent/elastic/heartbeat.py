"""Heartbeats of the training thread, which another thread sends; the supervisor judges what silence means."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch.autograd
import torch.distributed
import torch.nn.parallel

from pollux.agent.distributed import authenticated_store
from pollux.wire.live.heartbeat import Activity, Heartbeat

__all__ = ["HeartbeatSource", "thread_clock", "thread_is_held_up"]

_EVERY_SECONDS = 1.0
# Code that waits for other replicas: PyTorch's collectives, its backward pass (whose hooks wait), and our own.
_WAITING_CODE = (
    *(
        os.path.dirname(os.path.abspath(file)) + os.sep
        for file in (
            torch.distributed.__file__,
            torch.autograd.__file__,
            torch.nn.parallel.__file__,
            # This package's folder is `elastic`; the one above it is the whole agent.
            os.path.dirname(__file__),
        )
    ),
    # PyTorch waits for others by it where it makes a group.
    authenticated_store.__file__,
)
# A thread that waits for something that never comes uses nothing at all.
_LEAST_WORK_SECONDS = 0.0005


def thread_clock() -> Callable[[], float]:
    """A clock of the processor time that the calling thread has used, for other threads to look at."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return lambda: 0.0
    clock = clock_of(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def thread_is_held_up() -> Callable[[], bool]:
    """Whether the calling thread is in code that waits for other replicas, for other threads to ask.

    The innermost Python code counts: a user's hook that hangs inside a backward pass does not wait for a replica.
    """
    thread = threading.get_ident()

    def look() -> bool:
        frame = sys._current_frames().get(thread)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING_CODE)

    return look


class HeartbeatSource:
    """Makes the heartbeats of the training thread, from attributes that it sets and that another thread reads.

    `step` counts up as steps end; `busy` is what the thread does that may take long and is no step. A thread that
    computes something of the user's own, an evaluation for example, is seen by `worked`, its processor time. A thread
    that other replicas hold up, in a collective, is seen by `held_up`. A thread that is stuck elsewhere sends nothing:
    where all replicas stand still, the silent one is the one that holds the others up.
    """

    __slots__ = (
        "_clock",
        "_every",
        "_held_up",
        "_last_at",
        "_last_step",
        "_last_work",
        "_reads_since",
        "_wall",
        "_worked",
        "busy",
        "step",
    )

    def __init__(
        self,
        every_seconds: float = _EVERY_SECONDS,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = lambda: 0.0,
        held_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.step = -1
        self.busy = Activity.FIRST_STEP
        self._every = every_seconds
        self._wall = wall
        self._clock = clock
        self._last_at = float("-inf")
        self._last_step: int | None = None
        self._worked = worked
        self._held_up = held_up
        self._last_work = worked()
        self._reads_since = 0.0

    def start_reading(self) -> None:
        """The next batch is asked for, which may take long; `start_computing` ends that."""
        if self.busy in (Activity.TRAINING, Activity.PASS_END):
            self._reads_since = self._clock()
            self.busy = Activity.DATA

    def start_computing(self) -> None:
        """A batch is there, and the script has it next."""
        if self.busy in (Activity.DATA, Activity.PASS_END):
            self.busy = Activity.TRAINING

    def due(self) -> Heartbeat | None:
        """The heartbeat to send now: at most one a second, and none where nothing happened or was announced."""
        now = self._clock()
        if now - self._last_at < self._every:
            return None
        busy = self.busy
        stands_still = self.step == self._last_step and self._worked() - self._last_work < _LEAST_WORK_SECONDS
        waits = stands_still and not busy and self._held_up()
        if stands_still and not busy and not waits:
            return None
        return self._beat(now, busy, waits)

    def _beat(self, now: float, busy: Activity, waits: bool) -> Heartbeat:
        self._last_at, self._last_step, self._last_work = now, self.step, self._worked()
        seconds = now - self._reads_since if busy == Activity.DATA else 0.0
        return Heartbeat(self.step, self._wall(), busy, seconds, waits)

    def last(self) -> Heartbeat:
        """A heartbeat to send whenever the last one was sent: the process may end before the next one is due."""
        return self._beat(self._clock(), self.busy, False)
