"""The interfaces of stores: an append-only log of facts with snapshots, and telemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pollux.controller import Event

__all__ = ["SavedState", "Store", "Telemetry", "TelemetryRow"]


@dataclass(frozen=True, slots=True)
class SavedState:
    """The controller's state as plain JSON values after the event of `revision`."""

    revision: int
    state: Mapping[str, Any]


class Store(Protocol):
    """The log of facts. One writer at a time; facts are durable once `append` returns."""

    def append(self, events: Sequence[Event]) -> int:
        """Write all events durably, or none; returns the revision of the last. The first event has revision 1."""

    def read(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Events after that revision, in order, converted to the present version."""

    @property
    def revision(self) -> int:
        """The revision of the last event; 0 before the first."""

    def save(self, saved: SavedState) -> None:
        """Keep a snapshot; the last two are kept."""

    def load(self) -> SavedState | None:
        """The newest undamaged snapshot, or None."""

    def trim(self, keep_after: float) -> int:
        """Drop events that are older than that time and covered by the older snapshot; returns how many."""

    def setting(self, name: str) -> str | None:
        """A value kept beside the log, such as the hashes of tokens; None if it was never set."""

    def set_setting(self, name: str, value: str) -> None:
        """Keep a value durably."""

    def close(self) -> None:
        """Close files and release locks."""


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """One measurement of one job: `kind` is `report`, `eta` or `decision`; `values` are plain JSON."""

    job_id: str
    at: float
    kind: str
    values: Mapping[str, Any]


class Telemetry(Protocol):
    """Measurements over time, thinned as they age; losing old ones changes no decision."""

    def record(self, rows: Sequence[TelemetryRow]) -> None:
        """Write rows durably; the newest of each job and kind is always kept."""

    def latest(self, kind: str) -> Mapping[str, TelemetryRow]:
        """The newest row of each job."""

    def series(self, job_id: str, kind: str, since: float = 0.0, limit: int = 2000) -> list[TelemetryRow]:
        """Rows of a job in order of time, evenly thinned to at most `limit`."""

    def forget(self, job_id: str) -> None:
        """Drop a job's rows."""

    def close(self) -> None:
        """Close files."""
