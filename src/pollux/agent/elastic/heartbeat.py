"""Makes the heartbeats of the training thread, which another thread sends; the shim judges silence."""

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
    # PyTorch waits in it for other replicas when it makes a group.
    authenticated_store.__file__,
)
# A thread that waits uses no processor time at all.
_LEAST_WORK_SECONDS = 0.0005


def thread_clock() -> Callable[[], float]:
    """A clock of the processor time of the calling thread, which other threads can read."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    if clock_of is None:
        return lambda: 0.0
    clock = clock_of(threading.get_ident())
    return lambda: time.clock_gettime(clock)


def thread_is_held_up() -> Callable[[], bool]:
    """A function by which other threads find out whether the calling thread waits for other replicas.

    The innermost Python code counts: a user's hook that hangs inside a backward pass does not wait for a replica.
    """
    thread = threading.get_ident()

    def look() -> bool:
        frame = sys._current_frames().get(thread)
        return frame is not None and frame.f_code.co_filename.startswith(_WAITING_CODE)

    return look


class HeartbeatSource:
    """Makes heartbeats from attributes that the training thread sets and another thread reads.

    `step` is the last step; `busy` is an activity other than a step that may take long. `worked`, the thread's
    processor time, shows that it computes something of the user's, such as an evaluation. `held_up` shows that it waits
    for other replicas in a collective. A thread that hangs elsewhere sends nothing: so where no replica makes progress,
    the silent one holds up the others.
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
        """Note that the next batch is being read, which may take long, until `start_computing`."""
        if self.busy in (Activity.TRAINING, Activity.PASS_END):
            self._reads_since = self._clock()
            self.busy = Activity.DATA

    def start_computing(self) -> None:
        """Note that a batch was read, and the script gets it."""
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
        """A heartbeat to send at once, since the process may end before the next one is due."""
        return self._beat(self._clock(), self.busy, False)
