"""Keeps a thread working when a step of its work fails: logs and counts the failure, and tries again later."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["FailureBackoff"]

_UNHEALTHY_TURNS = 3
_PAUSE_SECONDS = (0.1, 5.0)

_log = logging.getLogger("pollux.backends")


class FailureBackoff:
    """Counts successive turns in which a step failed. One thread calls `turn` and `step`."""

    def __init__(self) -> None:
        self._bad_turns = 0
        self._has_failed = False

    @property
    def is_healthy(self) -> bool:
        """Whether there were failures in only a few turns in a row; may be read from any thread."""
        return self._bad_turns < _UNHEALTHY_TURNS

    def turn(self, what: Callable[[], object]) -> float:
        """Do one turn; the seconds to wait before the next, 0 where no step failed."""
        self._has_failed = False
        self.step(what)
        if not self._has_failed:
            self._bad_turns = 0
            return 0.0
        self._bad_turns += 1
        first, longest = _PAUSE_SECONDS
        return min(first * 2.0 ** min(self._bad_turns - 1, 10), longest)

    def step(self, what: Callable[[], object]) -> None:
        """Do one step of a turn; if it fails, the other steps still run."""
        try:
            what()
        except Exception:
            self._has_failed = True
            if self.is_healthy:
                _log.exception("a step of the backend failed; it is tried again")
