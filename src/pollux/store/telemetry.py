"""Measurements over time in one SQLite file: durable when `record` returns, thinned as they age."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.store._database import Database
from pollux.store._event_rows import to_text
from pollux.store._thinning import BETWEEN_THINNINGS, evenly, rows_to_keep
from pollux.store.protocol import TelemetryRow

__all__ = ["SqliteTelemetry"]

_STEPS = (
    """
    CREATE TABLE rows (id INTEGER PRIMARY KEY, job_id TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL,
                       body TEXT NOT NULL);
    CREATE INDEX rows_by_time ON rows (job_id, kind, at);
    CREATE TABLE newest (kind TEXT NOT NULL, job_id TEXT NOT NULL, at REAL NOT NULL, body TEXT NOT NULL,
                         PRIMARY KEY (kind, job_id)) WITHOUT ROWID
    """,
)


class SqliteTelemetry:
    """See `Telemetry`. Usable from any thread; rows recorded in one call are one transaction."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _STEPS)
        self._since_thinning: dict[tuple[str, str], int] = {}

    def record(self, rows: Sequence[TelemetryRow]) -> None:
        """Write them durably, all or none; now and then, thin the series that grew."""
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
        found = self._database.rows("SELECT job_id, at, body FROM newest WHERE kind = ?", (kind,))
        return {job_id: TelemetryRow(job_id, at, kind, json.loads(body)) for job_id, at, body in found}

    def series(self, job_id: str, kind: str, since: float = 0.0, limit: int = 2000) -> list[TelemetryRow]:
        """Rows of a job in order of time, evenly thinned to at most `limit`; the last is always among them."""
        found = self._database.rows(
            "SELECT at, body FROM rows WHERE job_id = ? AND kind = ? AND at >= ? ORDER BY at, id", (job_id, kind, since)
        )
        chosen = (found[index] for index in evenly(len(found), limit))
        return [TelemetryRow(job_id, at, kind, json.loads(body)) for at, body in chosen]

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
