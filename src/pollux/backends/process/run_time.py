"""For how long the replicas of a generation have run: written by the job's shim, read by services.

A clock that nobody can set, and that stops while the machine sleeps, measures it. A record keeps it, so that a later
service knows it even if the shim, or the machine, has ended since.
"""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

from pollux.backends.process.proc import boot_id
from pollux.backends.process.records import read_record, record_path, write_record
from pollux.core.errors import BackendFailed

__all__ = ["RunClock", "ran_seconds"]

_KIND = "ran"
_WRITE_SECONDS = 60.0


class RunClock:
    """The shim's side: counts while a generation runs, and writes that once a minute and at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._boot = boot_id()
        self._generation: int | None = None
        self._before = 0.0
        self._since = 0.0
        self._written_at = 0.0

    @property
    def due(self) -> float | None:
        """When `note` must be called next, on the monotonic clock; None while nothing runs."""
        return None if self._generation is None else self._written_at + _WRITE_SECONDS

    def note(self, generation: int | None) -> None:
        """Note which generation runs now; None: no replica does. A generation that runs again goes on counting."""
        now = time.monotonic()
        if generation == self._generation:
            if generation is not None and now >= self._written_at + _WRITE_SECONDS:
                self._write(now)
            return
        if self._generation is not None:
            self._write(now, ended=True)
        self._generation = generation
        if generation is not None:
            known = read_record(record_path(self._folder, _KIND, generation)) or {}
            self._before, self._since = _number(known.get("seconds")) or 0.0, now
            self._write(now)

    def _write(self, now: float, ended: bool = False) -> None:
        assert self._generation is not None
        self._written_at = now
        seconds = self._before + now - self._since
        record = {"seconds": seconds, "at": None if ended else now, "boot": self._boot}
        with contextlib.suppress(BackendFailed):
            write_record(record_path(self._folder, _KIND, self._generation), record, durable=False)


def ran_seconds(folder: Path, generation: int) -> float | None:
    """For how long that generation has run until now, or until its end; None where it was not measured."""
    record = read_record(record_path(folder, _KIND, generation)) or {}
    seconds, at = _number(record.get("seconds")), _number(record.get("at"))
    if seconds is None:
        return None
    goes_on = at is not None and record.get("boot") == boot_id() != ""
    if at is None or not goes_on or record_path(folder, "ended", generation).exists():
        return seconds
    return seconds + max(time.monotonic() - at, 0.0)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if is_number else None  # type: ignore[arg-type]
