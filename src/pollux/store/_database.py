"""One SQLite file with durable commits: transactions, migrations by numbered steps, plain errors."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pollux.core.errors import PolluxError, StoreFailed
from pollux.store._database_file import WriterLock, private_file, refuse_network

_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space on that disk and try again",
    sqlite3.SQLITE_READONLY: "make the file and its folder writable",
    sqlite3.SQLITE_CANTOPEN: "make its folder readable and writable, and see that no folder has its name",
    sqlite3.SQLITE_IOERR: "check the disk, then try again",
    sqlite3.SQLITE_CORRUPT: "it is damaged: restore a backup, or move it away to start with an empty one",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite file: restore a backup, or move it away to start with an empty one",
    sqlite3.SQLITE_BUSY: "another program has it open: close that one",
}


class Database:
    """A file with one writer. Writes are serialised; reads use another connection and never wait for the disk."""

    def __init__(self, path: Path, steps: Sequence[str]) -> None:
        self.path = path.absolute()
        self._writing = threading.RLock()
        self._reading = threading.RLock()
        with self.plain_errors():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_network(self.path.parent.resolve())
            self._lock = WriterLock(self.path.with_name(f"{self.path.name}.lock"))
        with contextlib.ExitStack() as undone:
            undone.callback(self._lock.release)
            with self.plain_errors():
                private_file(self.path)
                self._writer = undone.enter_context(contextlib.closing(self._connected()))
                self._migrate(steps)
                self._reader = self.reader()
            undone.pop_all()

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute(f"PRAGMA journal_size_limit = {64 * 2**20}")
        except BaseException:
            connection.close()
            raise
        if mode != "wal":
            connection.close()
            raise StoreFailed(f"{self.path}: this file system allows no write-ahead log; choose a local folder")
        return connection

    def reader(self) -> sqlite3.Connection:
        """Another connection for reading; the caller closes it."""
        with self.plain_errors():
            connection = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("PRAGMA query_only = ON")
            except BaseException:
                connection.close()
                raise
            return connection

    def _migrate(self, steps: Sequence[str]) -> None:
        with self.transaction() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS migrations (step INTEGER PRIMARY KEY)")
            done = connection.execute("SELECT coalesce(max(step), 0) FROM migrations").fetchone()[0]
            if done > len(steps):
                raise StoreFailed(
                    f"{self.path} has format {done}, this version of Pollux knows {len(steps)}; upgrade to use it"
                )
            for number, script in enumerate(steps[done:], start=done + 1):
                for statement in filter(str.strip, script.split(";")):
                    connection.execute(statement)
                connection.execute("INSERT INTO migrations VALUES (?)", (number,))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all writes inside are committed durably, or none."""
        with self._writing, self.plain_errors():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                # SQLite rolls back by itself after some errors.
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def rows(self, question: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, as of the last commit."""
        with self._reading, self.plain_errors():
            return self._reader.execute(question, arguments).fetchall()

    @contextlib.contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into StoreFailed with a remedy."""
        try:
            yield
        except PolluxError:
            raise
        except sqlite3.Error as error:
            # The low byte is the kind of error, the others are details.
            kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _REMEDIES.get(kind, "try again; if that does not help, restore a backup")
            raise StoreFailed(f"{self.path}: {error}; {remedy}") from error
        except OSError as error:
            raise StoreFailed(f"{self.path}: {error}; make its folder readable and writable") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()
            self._lock.release()
