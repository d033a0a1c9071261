"""The log of facts in one SQLite file: a batch is written as a whole, and is durable when `append` returns."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pollux.controller import Event
from pollux.core.errors import StoreFailed
from pollux.store._database import Database
from pollux.store._database_file import private_file
from pollux.store._event_rows import check_saved, event_from_text, event_to_text, state_to_text
from pollux.store.protocol import SavedState

__all__ = ["SqliteStore", "fact_digest", "is_unchanged", "whole_snapshot"]

_STEPS = (
    """
    CREATE TABLE events (revision INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
    CREATE TABLE snapshots (revision INTEGER PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL);
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL)
    """,
    "ALTER TABLE events ADD COLUMN digest TEXT",
)
"""Each step converts the file to the next format; add steps, never change one that was released."""

# Short queries, so that a slow reader of a long log does not keep SQLite from truncating its WAL.
_ROWS_AT_ONCE = 500
# As bytes: one damaged text that is not valid UTF-8 would fail the whole query.
_PAGE = (
    "SELECT revision, at, CAST(body AS BLOB), digest FROM events"
    " WHERE revision > ? AND revision <= ? ORDER BY revision LIMIT ?"
)
_SNAPSHOTS = "SELECT revision, digest, CAST(state AS BLOB) FROM snapshots ORDER BY revision DESC"
_HEAD = "head"
_IDENTITY = "identity"

_log = logging.getLogger(__name__)


class SqliteStore:
    """See `Store`. One writer at a time: a second one, of this process or another, is a Conflict.

    A full or broken disk raises StoreFailed and leaves nothing half-written; afterwards the store can be used again.
    """

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _STEPS)
        self._writing = threading.Lock()
        try:
            self._revision: int = self._database.rows(
                "SELECT max(coalesce((SELECT max(revision) FROM events), 0),"
                " coalesce((SELECT max(revision) FROM snapshots), 0))"
            )[0][0]
            self._require_same_store()
            self._require_end()
        except BaseException:
            self._database.close()
            raise

    def _require_same_store(self) -> None:
        """Refuse to begin a new log in place of another, whose disk may not be mounted.

        The log's identity is in the log and in a file beside it.
        """
        beside = self._path.with_name(f"{self._path.name}.id")
        identity = self.setting(_IDENTITY)
        with self._database.plain_errors():
            # Anything else there counts as another identity; reading a pipe would never end.
            known = beside.read_text(encoding="utf-8", errors="replace").strip() if beside.is_file() else None
            if identity is None and self._revision == 0 and known is not None:
                raise StoreFailed(
                    f"{self._path}: the log of this cluster was here and is gone, or is empty; restore a backup, "
                    f"or remove {beside} to begin a new cluster"
                )
            if identity is None:
                identity = secrets.token_hex(16)
                self.set_setting(_IDENTITY, identity)
            if known is not None and known != identity:
                _log.warning("%s is the log of another cluster than the one that was here before", self._path)
            if known != identity:
                private_file(beside)
                beside.write_text(f"{identity}\n", encoding="utf-8")

    def _require_end(self) -> None:
        head = self.setting(_HEAD)
        if head is not None and head.isdecimal() and int(head) > self._revision:
            raise StoreFailed(
                f"{self._path}: the facts {self._revision + 1} to {head} are missing at the end of the log; "
                "restore a backup; 'pollux doctor --store' lists what is undamaged"
            )

    def append(self, events: Sequence[Event]) -> int:
        """Write the events durably in one transaction; returns the revision of the last."""
        if not events:
            return self._revision
        bodies = [(event.at, event_to_text(event)) for event in events]
        with self._writing:
            rows = [
                (revision, at, body, fact_digest(revision, at, body))
                for revision, (at, body) in enumerate(bodies, start=self._revision + 1)
            ]
            with self._database.transaction() as connection:
                connection.executemany("INSERT INTO events (revision, at, body, digest) VALUES (?, ?, ?, ?)", rows)
                _set(connection, _HEAD, str(self._revision + len(rows)))
            self._revision += len(rows)
            return self._revision

    def read(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The events up to the one that was last when reading began; another thread may write meanwhile."""
        last = self._revision
        with contextlib.closing(self._database.reader()) as connection:
            while after < last:
                with self._database.plain_errors():
                    rows = connection.execute(_PAGE, (after, last, _ROWS_AT_ONCE)).fetchall()
                    if rows and rows[0][0] != after + 1 and not _is_first(connection, rows[0][0]):
                        raise self._missing(after + 1, rows[0][0] - 1)
                for number, (revision, at, body, digest) in enumerate(rows, start=rows[0][0] if rows else 0):
                    if revision != number:
                        raise self._missing(number, revision - 1)
                    yield revision, self._event(revision, at, body, digest)
                if not rows:
                    return
                after = rows[-1][0]

    def _event(self, revision: int, at: float, body: bytes, digest: str | None) -> Event:
        where = f"{self._path}: fact {revision}"
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            raise StoreFailed(f"{where} cannot be read: {error}; restore a backup") from error
        if not is_unchanged(revision, at, text, digest):
            raise StoreFailed(f"{where} has changed since it was written: its checksum differs; restore a backup")
        return event_from_text(text, where)

    def _missing(self, first: int, last: int) -> StoreFailed:
        which = f"fact {first} is" if first == last else f"the facts {first} to {last} are"
        return StoreFailed(
            f"{self._path}: {which} missing; restore a backup; 'pollux doctor --store' lists what is undamaged"
        )

    @property
    def revision(self) -> int:
        """The revision of the last event; 0 before the first."""
        return self._revision

    def save(self, saved: SavedState) -> None:
        """Keep a snapshot with its checksum, and the one before it; an empty store may begin with one."""
        text = state_to_text(saved.state)
        row = (saved.revision, _digest(saved.revision, text), text)
        with self._writing:
            check_saved(saved, self._revision)
            with self._database.transaction() as connection:
                connection.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)
                connection.execute(
                    "DELETE FROM snapshots WHERE revision NOT IN"
                    " (SELECT revision FROM snapshots ORDER BY revision DESC LIMIT 2)"
                )
                _set(connection, _HEAD, str(max(self._revision, saved.revision)))
            self._revision = max(self._revision, saved.revision)

    def load(self) -> SavedState | None:
        """The newest snapshot with a right checksum; None if there is none and the log is complete.

        StoreFailed if there is none and the beginning of the log was trimmed, since the state is then lost.
        """
        for revision, digest, state in self._database.rows(_SNAPSHOTS):
            text = whole_snapshot(revision, digest, state)
            if text is not None:
                self._require_next(revision)
                return SavedState(revision, json.loads(text))
            _log.warning("%s: the snapshot of revision %s is damaged; using the one before it", self._path, revision)
        first = self._database.rows("SELECT min(revision) FROM events")[0][0]
        if self._revision and first != 1:
            raise StoreFailed(
                f"{self._path}: all snapshots are damaged and the log begins at revision {first}; restore a backup"
            )
        return None

    def _require_next(self, revision: int) -> None:
        """Raise StoreFailed if the log does not continue where the snapshot ends."""
        following = self._database.rows("SELECT min(revision) FROM events WHERE revision > ?", (revision,))[0][0]
        if following is not None and following != revision + 1:
            raise self._missing(revision + 1, following - 1)

    @property
    def _path(self) -> Path:
        return self._database.path

    def trim(self, keep_after: float) -> int:
        """Drop the oldest events that the older of two snapshots covers, up to the first of `keep_after` or later."""
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
            _set(connection, name, value)

    def close(self) -> None:
        """Close the file and release its lock; a second call does nothing."""
        self._database.close()


def whole_snapshot(revision: int, digest: str, state: bytes) -> str | None:
    """The text of a snapshot; None if its checksum is wrong."""
    try:
        text = state.decode()
    except (UnicodeDecodeError, AttributeError):
        return None
    return text if digest == _digest(revision, text) else None


def fact_digest(revision: int, at: float, body: str) -> str:
    """The checksum of a fact's number, time and text."""
    return hashlib.sha256(f"{revision}\n{float(at)!r}\n{body}".encode()).hexdigest()[:32]


def is_unchanged(revision: int, at: object, body: str, digest: str | None) -> bool:
    """Whether a fact has its checksum; facts from before checksums have none."""
    return digest is None or (isinstance(at, int | float) and digest == fact_digest(revision, at, body))


def _digest(revision: int, text: str) -> str:
    return hashlib.sha256(f"{revision}\n{text}".encode()).hexdigest()


def _is_first(connection: sqlite3.Connection, revision: int) -> bool:
    """Whether the log begins with that fact, as after `trim`."""
    return bool(connection.execute("SELECT min(revision) FROM events").fetchone()[0] == revision)


def _set(connection: sqlite3.Connection, name: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
