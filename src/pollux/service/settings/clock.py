"""The service's clock: real time, or another clock in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


# The longest wait of a thread, since the wall clock may be set forward meanwhile.
_LONGEST_WAIT_SECONDS = 3600.0


class Clock(Protocol):
    """The present time, and how long to wait for a later one."""

    def now(self) -> float:
        """Seconds since 1970."""

    def seconds_until(self, at: float) -> float | None:
        """Seconds to wait for a time, 0 if it has come; None if the clock must be set."""


class SystemClock:
    """The machine's clock, except that it never goes back, even if the machine's is set back.

    Facts are in the order of their times, and pauses and limits must end: both need a clock that only goes on.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead = wall() - steady()

    def advance_to(self, at: float) -> float:
        """Set the clock to a time, if it is in the future; the seconds by which the machine's clock is behind."""
        behind = at - self.now()
        self._ahead = max(self._ahead, at - self._steady())
        return max(behind, 0.0)

    def now(self) -> float:
        """Seconds since 1970."""
        steady = self._steady()
        # Never smaller than before, in any thread.
        self._ahead = max(self._ahead, self._wall() - steady)
        return self._ahead + steady

    def seconds_until(self, at: float) -> float:
        """How long to wait for a time, an hour at most."""
        return min(max(at - self.now(), 0.0), _LONGEST_WAIT_SECONDS)
