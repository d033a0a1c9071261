"""The service's clock as a replaceable part: real time here, any other in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


# A waiting thread looks at the wall clock at least this often: it may have been put forward.
_LONGEST_WAIT_SECONDS = 3600.0


class Clock(Protocol):
    """Gives the time, and how long to wait for a later one."""

    def now(self) -> float:
        """Seconds since 1970."""

    def seconds_until(self, at: float) -> float | None:
        """How long to wait for a time, 0 where it has come; None: it comes when somebody moves the clock."""


class SystemClock:
    """The machine's clock, except that it never goes back: where the machine's is put back, this one goes on.

    Facts are in the order of their times, and pauses and limits must end: both need a clock that only goes on.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead = wall() - steady()

    def advance_to(self, at: float) -> float:
        """Go on from that time where it is in the future; the seconds by which the machine's clock is behind it."""
        behind = at - self.now()
        self._ahead = max(self._ahead, at - self._steady())
        return max(behind, 0.0)

    def now(self) -> float:
        """Seconds since 1970."""
        steady = self._steady()
        # Never less than before, in any thread.
        self._ahead = max(self._ahead, self._wall() - steady)
        return self._ahead + steady

    def seconds_until(self, at: float) -> float:
        """How long to wait for a time, an hour at most."""
        return min(max(at - self.now(), 0.0), _LONGEST_WAIT_SECONDS)
