"""The service's clock: real time, or another clock in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["FOLLOWED_SECONDS", "Clock", "SystemClock", "boot_seconds"]


# A waiting thread looks at the machine's clock at least this often.
_LONGEST_WAIT_SECONDS = 600.0

FOLLOWED_SECONDS = 5.0
"""A step forward of the machine's clock up to this is followed: time synchronisation makes such steps."""


class Clock(Protocol):
    """The present time, and how long to wait for a later one."""

    def now(self) -> float:
        """Seconds since 1970."""

    def seconds_until(self, at: float) -> float | None:
        """Seconds to wait for a time, 0 if it has come; None if the clock must be set."""

    @property
    def jumping(self) -> SystemClock | None:
        """This clock if it follows the machine's, which may jump; None for a clock that never jumps."""


def boot_seconds() -> float:
    """Seconds since the machine was started, sleep included; nobody can move this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class SystemClock:
    """The machine's clock as long as it keeps pace with the uptime; else this clock goes on by the uptime.

    It never goes back: facts are in the order of their times, and pauses must end. It follows steps forward of a few
    seconds. It follows larger ones only by `skip`: see `pollux.service.clocks`.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = boot_seconds) -> None:
        self._wall, self._steady = wall, steady
        self._ahead = wall() - steady()

    @property
    def jumping(self) -> SystemClock:
        """Itself: the machine's clock may be set."""
        return self

    @property
    def ahead(self) -> float:
        """By how much this clock is ahead of the machine's uptime."""
        return self._ahead

    def resume(self, ahead: float) -> None:
        """Go on as an earlier clock of the same boot, which was so far ahead of the uptime."""
        self._ahead = ahead

    def advance_to(self, at: float) -> float:
        """Set the clock to a time, if it is in the future; returns how many seconds the machine's clock is behind."""
        behind = at - self.now()
        self._ahead = max(self._ahead, at - self._steady())
        return max(behind, 0.0)

    def now(self) -> float:
        """Seconds since 1970."""
        steady = self._steady()
        offset = self._wall() - steady
        if 0.0 < offset - self._ahead <= FOLLOWED_SECONDS:
            # Never less than before, in any thread.
            self._ahead = max(self._ahead, offset)
        return self._ahead + steady

    def late(self) -> float:
        """By how much the machine's clock is ahead of this one; less than 0 if it is behind."""
        return self._wall() - self._steady() - self._ahead

    def uptime(self) -> float:
        """Seconds since the machine was started."""
        return self._steady()

    def skip(self, seconds: float) -> None:
        """Go forward."""
        self._ahead += seconds

    def seconds_until(self, at: float) -> float:
        """How long to wait for a time, ten minutes at most: meanwhile the machine's clock may be put forward."""
        return min(max(at - self.now(), 0.0), _LONGEST_WAIT_SECONDS)
