"""The log of facts in one SQLite file: durable when `append` returns, all of a batch or none of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pollux.controller import Event
from pollux.core.errors import StoreFailed
from pollux.store._database import Database
from pollux.store._event_rows import check_saved, event_from_text, event_to_text, to_text
from pollux.store.protocol import SavedState

__all__ = ["SqliteStore"]

_STEPS = (
    """
    CREATE TABLE events (revision INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
    CREATE TABLE snapshots (revision INTEGER PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL);
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)
    """,
)
"""Each brings the file one format further; never change one that was released, add another."""

# Short queries, so that a slow reader of a long log does not keep SQLite from truncating its WAL.
_ROWS_AT_ONCE = 500
_PAGE = "SELECT revision, body FROM events WHERE revision > ? AND revision <= ? ORDER BY revision LIMIT ?"

_log = logging.getLogger(__name__)


class SqliteStore:
    """See `Store`. One writer at a time: a second one, of this process or another, is refused with Conflict.

    A full or broken disk raises StoreFailed with nothing half-written; the store goes on once the disk does.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _STEPS)
        self._writing = threading.Lock()
        try:
            self._revision: int = self._database.rows(
                "SELECT max(coalesce((SELECT max(revision) FROM events), 0),"
                " coalesce((SELECT max(revision) FROM snapshots), 0))"
            )[0][0]
        except BaseException:
            self._database.close()
            raise

    def append(self, events: Sequence[Event]) -> int:
        """One transaction, on the disk before it returns; the revision of the last."""
        if not events:
            return self._revision
        bodies = [(event.at, event_to_text(event)) for event in events]
        with self._writing:
            rows = [(revision, at, body) for revision, (at, body) in enumerate(bodies, start=self._revision + 1)]
            with self._database.transaction() as connection:
                connection.executemany("INSERT INTO events VALUES (?, ?, ?)", rows)
            self._revision += len(rows)
            return self._revision

    def read(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The events that were there when reading began; another thread may write meanwhile."""
        last = self._revision
        path = self._database.path
        with contextlib.closing(self._database.reader()) as connection:
            while after < last:
                with self._database.plain_errors():
                    rows = connection.execute(_PAGE, (after, last, _ROWS_AT_ONCE)).fetchall()
                for revision, body in rows:
                    yield revision, event_from_text(body, f"{path}: fact {revision}")
                if not rows:
                    return
                after = rows[-1][0]

    @property
    def revision(self) -> int:
        """The revision of the last event; 0 before the first."""
        return self._revision

    def save(self, saved: SavedState) -> None:
        """Keep a snapshot with its checksum, and the one before it; an empty store may begin with one."""
        text = to_text(saved.state, "the controller's state")
        row = (saved.revision, _digest(saved.revision, text), text)
        with self._writing:
            check_saved(saved, self._revision)
            with self._database.transaction() as connection:
                connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)
                connection.execute(
                    "DELETE FROM snapshots WHERE revision NOT IN"
                    " (SELECT revision FROM snapshots ORDER BY revision DESC LIMIT 2)"
                )
            self._revision = max(self._revision, saved.revision)

    def load(self) -> SavedState | None:
        """The newest snapshot whose checksum is right; None where there is none and the log is all there.

        StoreFailed where there is none and the log's beginning was trimmed: the state cannot be known.
        """
        for revision, digest, text in self._database.rows(
            "SELECT revision, digest, state FROM snapshots ORDER BY revision DESC"
        ):
            if isinstance(text, str) and digest == _digest(revision, text):
                return SavedState(revision, json.loads(text))
            _log.warning("%s: the snapshot of revision %s is damaged; using what was before", self._path, revision)
        first = self._database.rows("SELECT min(revision) FROM events")[0][0]
        if self._revision and first != 1:
            raise StoreFailed(
                f"{self._path}: no snapshot is whole and the log begins at revision {first}; restore a backup"
            )
        return None

    @property
    def _path(self) -> Path:
        return self._database.path

    def trim(self, keep_after: float) -> int:
        """Drop the oldest events that the older of two snapshots covers, up to the first that is not old enough."""
        with self._database.transaction() as connection:
            count, covered = connection.execute("SELECT count(*), min(revision) FROM snapshots").fetchone()
            if count < 2:
                return 0
            first_kept = connection.execute(
                "SELECT coalesce(min(revision), ? + 1) FROM events WHERE revision <= ? AND at >= ?",
                (covered, covered, keep_after),
            ).fetchone()[0]
            return int(connection.execute("DELETE FROM events WHERE revision < ?", (first_kept,)).rowcount)

    def setting(self, name: str) -> str | None:
        """A value kept beside the log."""
        found = self._database.rows("SELECT value FROM settings WHERE name = ?", (name,))
        return str(found[0][0]) if found else None

    def set_setting(self, name: str, value: str) -> None:
        """Keep a value durably."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        self._database.close()


def _digest(revision: int, text: str) -> str:
    return hashlib.sha256(f"{revision}\n{text}".encode()).hexdigest()
