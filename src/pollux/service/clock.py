"""The service's clock as a replaceable part: real time here, any other in tests."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time; how long to sleep is the engine's."""

    def now(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()
