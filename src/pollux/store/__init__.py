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
    """The log in that file, made if it is not there; None: in memory.

    Conflict where another process has it open, StoreFailed where it cannot be read or is from a newer version.
    """
    if path is None:
        return MemoryStore()
    from pollux.store.sqlite import SqliteStore

    return SqliteStore(path)


def open_telemetry(path: Path | None) -> Telemetry:
    """The measurements in that file, made if it is not there; None: in memory. Refusals are those of `open_store`.

    A file that is damaged is put aside under another name: measurements decide nothing, and must not stop a service.
    """
    if path is None:
        return MemoryTelemetry()
    from pollux.store.telemetry import open_or_replace

    return open_or_replace(path)
