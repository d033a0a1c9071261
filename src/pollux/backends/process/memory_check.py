"""Compares the memory that a job's replicas use with their limit, as often as is cheap."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pollux.backends.process.launcher import ReplicaLauncher, ReplicaProcess

__all__ = ["MemoryCheck"]

_SECONDS = 0.25
# A check of much memory may take long: checks take at most a twentieth of the time.
_PAUSE_TIMES = 20.0


class MemoryCheck:
    """Checks the processes of a `launcher` against `limit_bytes` for each replica; 0 for no limit."""

    def __init__(self, launcher: ReplicaLauncher, limit_bytes: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self._launcher = launcher
        self._due = 0.0

    @property
    def due(self) -> float | None:
        """When `find_excess` must be called next, on the monotonic clock; None without a limit."""
        return self._due if self.limit_bytes > 0 else None

    def find_excess(self, processes: Mapping[int, ReplicaProcess]) -> tuple[int, float] | None:
        """A replica above the limit, with its bytes; None where there is none, or where the check is not due."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return None
        found = self._launcher.over_memory(processes, self.limit_bytes)
        self._due = now + max(_SECONDS, _PAUSE_TIMES * (time.monotonic() - now))
        return found
