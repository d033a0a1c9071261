"""The log of facts, its snapshots, and telemetry apart from it: in memory or in SQLite files."""

from __future__ import annotations

from pathlib import Path

from pollux.store.memory import MemoryStore, MemoryTelemetry
from pollux.store.protocol import SavedState, Store, Telemetry, TelemetryRow

__all__ = [
    "MemoryStore",
    "MemoryTelemetry",
    "SavedState",
    "Store",
    "Telemetry",
    "TelemetryRow",
    "open_store",
    "open_telemetry",
]


def open_store(path: Path | None) -> Store:
    """The log in that file, which is made if it does not exist; None: in memory.

    Conflict if another process has it open; StoreFailed if it cannot be read, or a newer version wrote it.
    """
    if path is None:
        return MemoryStore()
    from pollux.store.sqlite import SqliteStore

    return SqliteStore(path)


def open_telemetry(path: Path | None) -> Telemetry:
    """The measurements in that file, which is made if it does not exist; None: in memory. Errors as in `open_store`.

    A damaged file is renamed and a new one made, since no decision needs measurements.
    """
    if path is None:
        return MemoryTelemetry()
    from pollux.store.telemetry import open_or_replace

    return open_or_replace(path)
