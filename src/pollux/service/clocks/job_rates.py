"""Bounds on how often each job may do something: a token bucket per job."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["JobRates"]

_MOST_JOBS = 65_536


class JobRates:
    """Each job has `burst` tokens, and gets a new one every `refill_seconds`. Not for several threads."""

    def __init__(self, burst: int, refill_seconds: float) -> None:
        self._burst, self._refill = float(burst), refill_seconds
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, job_id: str, now: float, reserve: int = 0) -> bool:
        """Take a token, if more than `reserve` are left at `now`; returns whether there was one."""
        left, at = self._left.pop(job_id, (self._burst, now))
        left = min(left + max(now - at, 0.0) / self._refill, self._burst)
        taken = left >= 1.0 + reserve
        self._left[job_id] = left - taken, now
        if len(self._left) > _MOST_JOBS:
            self._left.popitem(last=False)
        return taken
