"""Measurements over time in one SQLite file; durable when `record` returns, thinned as they age."""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.core.errors import StoreFailed
from pollux.store._database import Database
from pollux.store._event_rows import to_text
from pollux.store._thinning import BETWEEN_THINNINGS, evenly, rows_to_keep
from pollux.store.protocol import TelemetryRow

__all__ = ["SqliteTelemetry", "open_or_replace"]

_log = logging.getLogger(__name__)

_STEPS = (
    """
    CREATE TABLE rows (id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL,
                       body TEXT NOT NULL);
    CREATE INDEX rows_by_time ON rows (job_id, kind, at);
    CREATE TABLE newest (kind TEXT NOT NULL, job_id TEXT NOT NULL, at REAL NOT NULL, body TEXT NOT NULL,
                         PRIMARY KEY (kind, job_id)) WITHOUT ROWID
    """,
)


_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def open_or_replace(path: Path) -> SqliteTelemetry:
    """The measurements in that file; a damaged file is renamed, and a new one made."""
    try:
        found = SqliteTelemetry(path)
        try:
            found.check()
        except StoreFailed:
            found.close()
            raise
        return found
    except StoreFailed as error:
        if getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
            raise
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        _log.warning("%s; it is renamed to %s, and charts start empty", error, aside.name)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
        return SqliteTelemetry(path)


class SqliteTelemetry:
    """See `Telemetry`. Usable from any thread; rows recorded in one call are one transaction."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _STEPS)
        self._since_thinning: dict[tuple[str, str], int] = {}
        self._warned = False

    def check(self) -> None:
        """Read each job's newest measurement; StoreFailed if the file is damaged."""
        self._database.rows("SELECT count(*), sum(length(body)) FROM newest")

    def record(self, rows: Sequence[TelemetryRow]) -> None:
        """Write all rows durably, or none; thin a series after each 64 new rows."""
        if not rows:
            return
        written = [
            (row.job_id, row.kind, float(row.at), to_text(row.values, f"telemetry of '{row.job_id}'")) for row in rows
        ]
        with self._database.transaction() as connection:
            connection.executemany("INSERT INTO rows (job_id, kind, at, body) VALUES (?, ?, ?, ?)", written)
            connection.executemany(
                "INSERT INTO newest (job_id, kind, at, body) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (kind, job_id) DO UPDATE SET at = excluded.at, body = excluded.body"
                " WHERE excluded.at >= newest.at",
                written,
            )
            for row in rows:
                key = (row.job_id, row.kind)
                self._since_thinning[key] = self._since_thinning.get(key, 0) + 1
                if self._since_thinning[key] >= BETWEEN_THINNINGS:
                    self._since_thinning[key] = 0
                    _thin(connection, *key)

    def latest(self, kind: str) -> Mapping[str, TelemetryRow]:
        """The newest row of each job."""
        found = self._database.rows("SELECT job_id, at, CAST(body AS BLOB) FROM newest WHERE kind = ?", (kind,))
        rows = (self._row(job_id, at, kind, body) for job_id, at, body in found)
        return {row.job_id: row for row in rows if row is not None}

    def _row(self, job_id: str, at: float, kind: str, body: bytes) -> TelemetryRow | None:
        """A measurement; None if it is damaged, with one warning for all of them."""
        try:
            values = json.loads(body)
        except (ValueError, TypeError, RecursionError):
            values = None
        if isinstance(values, dict) and isinstance(at, float | int):
            return TelemetryRow(job_id, float(at), kind, values)
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: a measurement of job '%s' is damaged; damaged measurements are left out",
                self._database.path,
                job_id,
            )
        return None

    def series(self, job_id: str, kind: str, since: float = 0.0, limit: int = 2000) -> list[TelemetryRow]:
        """Rows of a job in order of time, evenly thinned to at most `limit`; the last is always among them."""
        found = self._database.rows(
            "SELECT at, CAST(body AS BLOB) FROM rows WHERE job_id = ? AND kind = ? AND at >= ? ORDER BY at, id",
            (job_id, kind, since),
        )
        chosen = (found[index] for index in evenly(len(found), limit))
        rows = (self._row(job_id, at, kind, body) for at, body in chosen)
        return [row for row in rows if row is not None]

    def forget(self, job_id: str) -> None:
        """Drop a job's rows."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM rows WHERE job_id = ?", (job_id,))
            connection.execute("DELETE FROM newest WHERE job_id = ?", (job_id,))
            for key in [key for key in self._since_thinning if key[0] == job_id]:
                del self._since_thinning[key]

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        self._database.close()


def _thin(connection: sqlite3.Connection, job_id: str, kind: str) -> None:
    found = connection.execute(
        "SELECT id, at FROM rows WHERE job_id = ? AND kind = ? ORDER BY at, id", (job_id, kind)
    ).fetchall()
    stay = {found[index][0] for index in rows_to_keep([at for _, at in found])}
    connection.executemany("DELETE FROM rows WHERE id = ?", [(row,) for row, _ in found if row not in stay])
