"""The service's clock as a replaceable part: real time here, any other in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time; how long to sleep is the engine's."""

    def now(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    """The machine's clock, except that it never goes back: where the machine's is put back, this one goes on.

    Facts are in the order of their times, and pauses and limits must end: both need a clock that only goes on.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead = wall() - steady()

    def begin_at(self, at: float) -> float:
        """Go on from that time where it is still to come; by how many seconds the machine's clock is behind."""
        behind = at - self.now()
        self._ahead = max(self._ahead, at - self._steady())
        return max(behind, 0.0)

    def now(self) -> float:
        """Seconds since 1970."""
        steady = self._steady()
        # Never less than before, whichever thread looks.
        self._ahead = max(self._ahead, self._wall() - steady)
        return self._ahead + steady
