"""Checks the facts and snapshots of a store, without changing it, also while a service writes."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pollux.core.errors import StoreFailed
from pollux.store._event_rows import event_from_text
from pollux.store.sqlite import is_unchanged, whole_snapshot

__all__ = ["StoreState", "inspect_store"]

_MOST_FAULTS = 20


@dataclass(frozen=True, slots=True)
class StoreState:
    """The revisions of the facts (`first` 0: none), the undamaged snapshots, and all faults as sentences."""

    first: int
    last: int
    num_facts: int
    snapshots: tuple[int, ...]
    faults: tuple[str, ...]


def inspect_store(path: Path) -> StoreState:
    """Read every fact and every snapshot of the log in that file; StoreFailed if it cannot be opened or read."""
    if not path.exists():
        raise StoreFailed(f"{path} does not exist: start a service with 'pollux up', or restore a backup")
    if not path.is_file():
        raise StoreFailed(f"{path} is no plain file: move it away, and restore a backup")
    faults: list[str] = []
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            faults += _damage(connection)
            numbers: list[int] = []
            for revision, fault in _facts(connection):
                numbers.append(revision)
                faults += [fault] if fault else []
            snapshots, broken = _snapshots(connection)
            head = connection.execute("SELECT value FROM settings WHERE name = 'head'").fetchone()
    except sqlite3.Error as error:
        raise StoreFailed(
            f"{path} cannot be read: {error}; restore a backup, or move it away to start with an empty one"
        ) from error
    faults += [f"the snapshot of fact {revision} is damaged" for revision in broken]
    faults += _gaps(numbers, snapshots, int(head[0]) if head and head[0].isdecimal() else 0)
    first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
    return StoreState(first, last, len(numbers), snapshots, _first_of(faults))


def _first_of(faults: list[str]) -> tuple[str, ...]:
    """The first faults, and how many more there are."""
    more = len(faults) - _MOST_FAULTS
    return (*faults[:_MOST_FAULTS], *([f"and {more} more"] if more > 0 else []))


def _damage(connection: sqlite3.Connection) -> list[str]:
    """What SQLite itself finds wrong with the file."""
    lines = connection.execute(f"PRAGMA integrity_check({_MOST_FAULTS})")
    return [f"the file is damaged: {line}" for (line,) in lines if line != "ok"]


def _facts(connection: sqlite3.Connection) -> Iterator[tuple[int, str]]:
    """The number of each fact, and its fault, if any."""
    columns = {row[1] for row in connection.execute("PRAGMA table_info(events)")}
    digest = "digest" if "digest" in columns else "NULL"
    rows = connection.execute(f"SELECT revision, at, CAST(body AS BLOB), {digest} FROM events ORDER BY revision")
    for revision, at, body, known in rows:
        try:
            text = body.decode()
            event_from_text(text, f"fact {revision}")
        except UnicodeDecodeError as error:
            yield revision, f"fact {revision} is not UTF-8 text: {error}"
        except StoreFailed as error:
            yield revision, str(error)
        else:
            yield (
                revision,
                "" if is_unchanged(revision, at, text, known) else f"fact {revision} has changed since it was written",
            )


def _snapshots(connection: sqlite3.Connection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The undamaged snapshots, and the damaged ones."""
    found = connection.execute(
        "SELECT revision, digest, CAST(state AS BLOB) FROM snapshots ORDER BY revision"
    ).fetchall()
    whole = tuple(row[0] for row in found if whole_snapshot(*row) is not None)
    return whole, tuple(row[0] for row in found if row[0] not in whole)


def _gaps(numbers: list[int], snapshots: tuple[int, ...], head: int) -> list[str]:
    """The facts that are missing, as sentences."""
    begin = max((revision for revision in snapshots if not numbers or revision + 1 >= numbers[0]), default=0)
    expected = min(numbers[0], begin + 1) if numbers else begin + 1
    missing = []
    for number in [*numbers, max(head, begin) + 1]:
        if number > expected:
            last = number - 1
            missing.append(
                f"fact {last} is missing" if expected == last else f"the facts {expected} to {last} are missing"
            )
        expected = max(expected, number + 1)
    return missing
