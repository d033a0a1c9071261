"""The service's log within bounds: repeats are counted, not written, and the file begins anew when it is long.

No peer may fill the disk with log lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

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
        with contextlib.suppress(OSError):
            found = os.fstat(self._descriptor)
            if found.st_size <= self._most_bytes or not self._is_ours(found):
                return False
            self._keep(found.st_size)
            # Processes that append to it go on at its new end.
            os.truncate(self._path, 0)
            return True
        return False

    def _is_ours(self, found: os.stat_result) -> bool:
        named = self._path.lstat()
        appends = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_APPEND
        return bool(appends) and stat.S_ISREG(named.st_mode) and os.path.samestat(found, named)

    def _keep(self, size: int) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)
        with self._path.open("rb") as source:
            source.seek(max(size - self._most_bytes, 0))
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
                target.write(source.read(self._most_bytes))
        new.replace(self._path.with_name(f"{self._path.name}.1"))


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
