"""A store and telemetry that live as long as their process: for tests and for `pollux run`."""

from __future__ import annotations

import bisect
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence

from pollux.controller import Event
from pollux.store._event_rows import check_saved, event_from_text, event_to_text, state_to_text, to_text
from pollux.store._thinning import BETWEEN_THINNINGS, evenly, rows_to_keep
from pollux.store.protocol import SavedState, TelemetryRow

__all__ = ["MemoryStore", "MemoryTelemetry"]


class MemoryStore:
    """The log as a list of texts, so that it returns what a file would return. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._events: list[tuple[int, float, str]] = []
        self._snapshots: dict[int, str] = {}
        self._settings: dict[str, str] = {}
        self._revision = 0

    def append(self, events: Sequence[Event]) -> int:
        """Append all events, or none if one has no written form."""
        texts = [event_to_text(event) for event in events]
        with self._lock:
            first = self._revision + 1
            self._events += [
                (revision, event.at, text) for revision, event, text in zip(itertools.count(first), events, texts)
            ]
            self._revision += len(texts)
            return self._revision

    def read(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The events up to the one that was last when reading began."""
        with self._lock:
            rows = [row for row in self._events if row[0] > after]
        for revision, _, text in rows:
            yield revision, event_from_text(text, f"fact {revision}")

    @property
    def revision(self) -> int:
        """The revision of the last event; 0 before the first."""
        return self._revision

    def save(self, saved: SavedState) -> None:
        """Keep a snapshot of a logged revision; an empty store may begin with one."""
        text = state_to_text(saved.state)
        with self._lock:
            check_saved(saved, self._revision)
            self._revision = max(self._revision, saved.revision)
            self._snapshots[saved.revision] = text
            for revision in sorted(self._snapshots)[:-2]:
                del self._snapshots[revision]

    def load(self) -> SavedState | None:
        """The newest snapshot, or None."""
        with self._lock:
            if not self._snapshots:
                return None
            newest = max(self._snapshots)
            return SavedState(newest, json.loads(self._snapshots[newest]))

    def trim(self, keep_after: float) -> int:
        """Drop the oldest events that the older of two snapshots covers, up to the first of `keep_after` or later."""
        with self._lock:
            covered = min(self._snapshots) if len(self._snapshots) > 1 else 0
            dropped = sum(
                1 for _ in itertools.takewhile(lambda row: row[0] <= covered and row[1] < keep_after, self._events)
            )
            del self._events[:dropped]
            return dropped

    def setting(self, name: str) -> str | None:
        """A value kept beside the log."""
        return self._settings.get(name)

    def set_setting(self, name: str, value: str) -> None:
        """Keep a value."""
        self._settings[name] = value

    def close(self) -> None:
        """Nothing to close."""


class MemoryTelemetry:
    """Measurements in lists, thinned like those on disk. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._series: dict[tuple[str, str], list[TelemetryRow]] = {}
        self._newest: dict[tuple[str, str], TelemetryRow] = {}
        self._since_thinning: dict[tuple[str, str], int] = {}

    def record(self, rows: Sequence[TelemetryRow]) -> None:
        """Store them, in order of time."""
        copies = [
            TelemetryRow(row.job_id, row.at, row.kind, json.loads(to_text(row.values, f"telemetry of '{row.job_id}'")))
            for row in rows
        ]
        with self._lock:
            for row in copies:
                self._add(row)

    def _add(self, row: TelemetryRow) -> None:
        key = (row.job_id, row.kind)
        series = self._series.setdefault(key, [])
        bisect.insort(series, row, key=lambda one: one.at)
        newest = self._newest.get(key)
        if newest is None or row.at >= newest.at:
            self._newest[key] = row
        self._since_thinning[key] = self._since_thinning.get(key, 0) + 1
        if self._since_thinning[key] >= BETWEEN_THINNINGS:
            self._since_thinning[key] = 0
            series[:] = [series[index] for index in rows_to_keep([one.at for one in series])]

    def latest(self, kind: str) -> Mapping[str, TelemetryRow]:
        """The newest row of each job."""
        with self._lock:
            return {job_id: row for (job_id, its_kind), row in self._newest.items() if its_kind == kind}

    def series(self, job_id: str, kind: str, since: float = 0.0, limit: int = 2000) -> list[TelemetryRow]:
        """Rows of a job in order of time, evenly thinned to at most `limit`; the last is always among them."""
        with self._lock:
            rows = [row for row in self._series.get((job_id, kind), ()) if row.at >= since]
        return [rows[index] for index in evenly(len(rows), limit)]

    def forget(self, job_id: str) -> None:
        """Drop a job's rows."""
        with self._lock:
            for key in [key for key in self._newest if key[0] == job_id]:
                for part in (self._series, self._newest, self._since_thinning):
                    part.pop(key, None)

    def close(self) -> None:
        """Nothing to close."""
