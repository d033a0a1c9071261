"""The service's log within bounds: repeats are counted, not written, and the file begins anew when it is long.

No peer may fill the disk with log lines.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from pollux.storage.state_file import keep_end
from pollux.wire.visible_text import visible

__all__ = ["MAX_LOG_BYTES", "LogFile", "RepeatFilter", "bounded_log"]

MAX_LOG_BYTES = 8 << 20
"""The most bytes of `service.log`; `service.log.1` may be as large."""

_BURST = 20
_REFILL_SECONDS = 10.0
_MOST_MESSAGES = 512


class RepeatFilter(logging.Filter):
    """Lets twenty records of the same message through, then one in ten seconds, which says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # By message: what is left of the burst, since when, and how many were left out.
        self._known: OrderedDict[tuple[str, str], tuple[float, float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it."""
        key, now = (record.name, str(record.msg)), self._clock()
        left, at, missing = self._known.pop(key, (float(_BURST), now, 0))
        left = min(left + max(now - at, 0.0) / _REFILL_SECONDS, float(_BURST))
        writes = left >= 1.0
        self._known[key] = (left - 1.0, now, 0) if writes else (left, now, missing + 1)
        if len(self._known) > _MOST_MESSAGES:
            self._known.popitem(last=False)
        if writes and missing:
            record.msg = f"{record.getMessage()} ({missing} more like this were not written)"
            record.args = ()
        return writes


class LogFile:
    """The file that standard error goes to, if that is the log of this home and is opened for appending."""

    def __init__(self, path: Path, most_bytes: int = MAX_LOG_BYTES, descriptor: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._descriptor = _standard_error() if descriptor is None else descriptor

    def shorten(self) -> bool:
        """If it is too long, keep it as `.1` and begin anew; returns whether that was done. Never raises."""
        return keep_end(self._path, self._descriptor, self._most_bytes)


def _standard_error() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return 2


class _VisibleFormatter(logging.Formatter):
    """Writes out control characters, such as those in an engine's last words: a terminal may show the log."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


@contextlib.contextmanager
def bounded_log() -> Iterator[None]:
    """Within it, repeated messages are counted instead of written, and their control characters are written out.

    That holds for all loggers, since it is done where records are written: at the root's handlers, or where there are
    none at the handler of last resort.
    """
    last = logging.lastResort
    filters = {each: RepeatFilter() for each in (last, *logging.getLogger().handlers) if each is not None}
    before = None if last is None else last.formatter
    for handler, each in filters.items():
        handler.addFilter(each)
    if last is not None:
        last.setFormatter(_VisibleFormatter())
    try:
        yield
    finally:
        for handler, each in filters.items():
            handler.removeFilter(each)
        if last is not None:
            last.setFormatter(before)
