"""What the API refuses to strangers: each kind is a line in the log now and then, and all are counted."""

from __future__ import annotations

import logging
import threading

from pollux.backends.process.refusals import RefusalLog

__all__ = ["ApiRefusals"]

_log = logging.getLogger("pollux.service")
_MOST_CHARACTERS = 300


class ApiRefusals:
    """Counts refusals, and writes at most one line in ten seconds for each kind. May be used in any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._lines = RefusalLog("the API", lambda line, _: _log.warning(line))

    def tell(self, who: tuple[str, int] | str, kind: str, why: str, ours: tuple[object, ...] | None = None) -> None:
        """Report that a request or connection of `who` was refused; `ours` is its end here, where it is known."""
        with self._lock:
            self.count += 1
            if isinstance(who, str):
                self._lines.tell(who, kind, why[:_MOST_CHARACTERS])
            else:
                self._lines.refuse_at(who, ours, kind, why[:_MOST_CHARACTERS])
