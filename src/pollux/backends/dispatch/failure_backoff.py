"""Steps of a thread's work of which none may end it: what goes wrong is logged, counted, and tried again later."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["FailureBackoff"]

_UNHEALTHY_TURNS = 3
_PAUSE_SECONDS = (0.1, 5.0)

_log = logging.getLogger("pollux.backends")


class FailureBackoff:
    """Counts the turns in a row in which a step failed. One thread calls `turn` and `step`."""

    def __init__(self) -> None:
        self._bad_turns = 0
        self._has_failed = False

    @property
    def are_few(self) -> bool:
        """Whether work gets done, not counting a mistake now and then; may be asked from any thread."""
        return self._bad_turns < _UNHEALTHY_TURNS

    def turn(self, what: Callable[[], object]) -> float:
        """Do one turn; seconds to wait before the next, 0 where all of it went well."""
        self._has_failed = False
        self.step(what)
        if not self._has_failed:
            self._bad_turns = 0
            return 0.0
        self._bad_turns += 1
        first, longest = _PAUSE_SECONDS
        return min(first * 2.0 ** min(self._bad_turns - 1, 10), longest)

    def step(self, what: Callable[[], object]) -> None:
        """One step of a turn: a mistake in it holds up neither the other steps nor the other jobs."""
        try:
            what()
        except Exception:
            self._has_failed = True
            if self.are_few:
                _log.exception("a step of the backend failed; it is tried again")
