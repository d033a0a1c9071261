"""Records that cannot be written: training goes on without them, and the log says so once for each kind of record.

A full, read-only or broken disk, lost permissions, a folder that is gone: none of these may end training. Checkpoints
are no records: `pollux.agent.checkpoint` reports their failures and tries again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["SaidOnce"]

_log = logging.getLogger("pollux")


class SaidOnce:
    """Remembers which records could not be written."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextlib.contextmanager
    def tolerated(self, what: str) -> Iterator[None]:
        """Go on where writing `what` fails, whatever the reason: libraries that draw and write may raise anything."""
        try:
            yield
        except Exception as error:
            self.say(what, error)

    def say(self, what: str, error: Exception) -> None:
        """Say that `what` could not be written, unless that was said before."""
        if what not in self._said:
            self._said.add(what)
            _log.error(
                "%s cannot be written, training goes on without it: %s", what, str(error) or type(error).__name__
            )

    def has_failed(self, what: str) -> bool:
        """Whether writing `what` has failed before."""
        return what in self._said
