"""History files: every fact and measurement, one JSON value per line; docs/history.md describes the lines.

`pollux.sim.workloads.history` makes workloads of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pollux.controller import Controller, ControllerSettings, Event, JobSubmitted
from pollux.controller.codec.events import decode, encode
from pollux.core import Cluster
from pollux.core.errors import Conflict, InvalidInput, PolluxError, StoreFailed
from pollux.store._event_rows import to_text
from pollux.store.protocol import SavedState, Store, Telemetry, TelemetryRow

__all__ = ["HISTORY_VERSION", "HistoryContents", "export", "import_into", "parse", "start"]

HISTORY_VERSION = 1
"""The version of the format that is written; this and older versions are read."""

_FORMAT = "pollux-history"
_KINDS = ("report", "eta", "decision")
_ROW_FIELDS = ("job_id", "at", "kind", "values")


@dataclass(frozen=True, slots=True)
class HistoryContents:
    """A whole history. `saved` is the state at the beginning if the oldest facts were trimmed, else None.

    `facts` are in order, with their revisions; some may be older than `saved`, which then includes them.
    """

    saved: SavedState | None
    facts: tuple[tuple[int, Event], ...]
    telemetry: tuple[TelemetryRow, ...]

    @property
    def to_apply(self) -> tuple[tuple[int, Event], ...]:
        """The facts after `saved`, which lead from it to the last state."""
        base = 0 if self.saved is None else self.saved.revision
        return tuple((revision, event) for revision, event in self.facts if revision > base)


def export(store: Store, telemetry: Telemetry | None = None) -> Iterator[bytes]:
    """The lines of a history: header, state if the log was trimmed, facts, measurements, footer.

    Another thread may write to the store meanwhile; its new facts are left out.
    """
    last, facts, jobs = store.revision, 0, set()
    yield _line({"format": _FORMAT, "version": HISTORY_VERSION, "revision": last})
    # Loaded before the facts are read: after a newer snapshot, events that this one needs may be trimmed.
    saved = store.load()
    for revision, event in store.read():
        if revision > last:
            break
        if not facts and revision > 1:
            yield _state_line(saved)
        if isinstance(event, JobSubmitted):
            jobs.add(event.spec.id)
        facts += 1
        yield _line({"revision": revision, "fact": encode(event)})
    if not facts and last:
        yield _state_line(saved)
    rows = 0
    for row in _measurements(telemetry, jobs) if telemetry is not None else ():
        rows += 1
        yield _line({"telemetry": {name: getattr(row, name) for name in _ROW_FIELDS}})
    yield _line({"end": {"facts": facts, "telemetry": rows}})


def _state_line(saved: SavedState | None) -> bytes:
    if saved is None:
        raise StoreFailed("the beginning of the log was trimmed and no snapshot has it; restore a backup")
    return _line({"revision": saved.revision, "state": saved.state})


def _line(value: Any) -> bytes:
    return f"{to_text(value, 'a line of the history')}\n".encode()


def _measurements(telemetry: Telemetry, jobs: set[str]) -> Iterator[TelemetryRow]:
    for kind in _KINDS:
        for job_id in sorted(jobs | set(telemetry.latest(kind))):
            yield from telemetry.series(job_id, kind)


def import_into(lines: Iterable[bytes | str], store: Store, telemetry: Telemetry | None = None) -> int:
    """Write a whole history into an empty store; the store's revision afterwards.

    Nothing is written unless all lines can be read and all facts can be applied. Facts that a state in the history
    includes are left out.
    """
    if store.revision:
        raise Conflict(f"the store has {store.revision} facts already; import into an empty one")
    contents = parse(lines)
    controller = start(contents)
    for revision, event in contents.to_apply:
        try:
            controller.apply(event)
        except PolluxError as error:
            raise InvalidInput(f"history: fact {revision} cannot follow the facts before it: {error}") from None
    if contents.saved is not None:
        store.save(contents.saved)
    if telemetry is not None:
        # An import may be tried again after it failed half-way, for instance on a full disk.
        for job_id in {row.job_id for row in contents.telemetry}:
            telemetry.forget(job_id)
        telemetry.record(contents.telemetry)
    return store.append([event for _, event in contents.to_apply])


def start(contents: HistoryContents) -> Controller:
    """The controller before the first of `to_apply`: empty, or with the state `saved`."""
    # Under `rounds` it computes no predictions, so that facts are applied quickly.
    settings = ControllerSettings("rounds")
    if contents.saved is None:
        return Controller(Cluster(()), settings)
    try:
        return Controller.restored(contents.saved.state, settings)
    except (PolluxError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"history: the state of revision {contents.saved.revision} cannot be read ({error!r}); export it again"
        ) from None


def parse(lines: Iterable[bytes | str]) -> HistoryContents:
    """Read a whole history; InvalidInput names the line that cannot be read, or says that the end is missing."""
    reader = _Reader()
    number = 0
    for number, line in enumerate(lines, start=1):
        try:
            reader.read_line(_object_of(line))
        except PolluxError as error:
            raise InvalidInput(f"history, line {number}: {error}") from None
    return reader.finished(number)


def _object_of(line: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"is not JSON ({error}); give a file of 'pollux history export'") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"is {type(value).__name__}; every line must be a JSON object")
    return value


class _Reader:
    """Reads the lines of a history one by one, and collects their content."""

    def __init__(self) -> None:
        self._started = False
        self._ended = False
        self._saved: SavedState | None = None
        self._facts: list[tuple[int, Event]] = []
        self._rows: list[TelemetryRow] = []

    def read_line(self, value: dict[str, Any]) -> None:
        if not self._started:
            self._header(value)
        elif self._ended:
            raise InvalidInput("comes after the end; remove it")
        elif "fact" in value:
            self._fact(value)
        elif "telemetry" in value:
            self._rows.append(_row(value["telemetry"]))
        elif "state" in value:
            self._state(value)
        elif "end" in value:
            self._end(value["end"])
        else:
            raise InvalidInput(f"has {', '.join(sorted(value)) or 'nothing'}; give fact, state, telemetry or end")

    def _header(self, value: dict[str, Any]) -> None:
        if value.get("format") != _FORMAT:
            raise InvalidInput(f'is not the header of a history; it must have "format": "{_FORMAT}"')
        version = value.get("version")
        if not isinstance(version, int) or version < 1:
            raise InvalidInput(f"version is {version!r}; it must be a whole number, 1 or more")
        if version > HISTORY_VERSION:
            raise InvalidInput(f"has version {version}, this version of Pollux reads {HISTORY_VERSION}; upgrade")
        self._started = True

    def _fact(self, value: dict[str, Any]) -> None:
        revision = _revision(value)
        if self._facts and revision != self._facts[-1][0] + 1:
            raise InvalidInput(f"revision is {revision} after {self._facts[-1][0]}; facts must follow each other")
        if not self._facts and revision > 1 and self._saved is None:
            raise InvalidInput(f"the first fact has revision {revision}, and no state covers what was before it")
        self._facts.append((revision, decode(value["fact"])))

    def _state(self, value: dict[str, Any]) -> None:
        if self._facts or self._saved is not None:
            raise InvalidInput("a state must come once, before the first fact")
        if not isinstance(value["state"], dict):
            raise InvalidInput("state must be a JSON object")
        self._saved = SavedState(_revision(value), value["state"])

    def _end(self, value: Any) -> None:
        found = {"facts": len(self._facts), "telemetry": len(self._rows)}
        if value != found:
            raise InvalidInput(f"the end says {value}, but there were {found}: lines are missing; export it again")
        self._ended = True

    def finished(self, number: int) -> HistoryContents:
        if not self._ended:
            raise InvalidInput(f"history ends after line {number}, before its last line; export it again")
        base = self._saved.revision if self._saved is not None else 0
        if self._saved is not None and self._facts and base + 1 < self._facts[0][0]:
            raise InvalidInput(f"history: facts {base + 1} to {self._facts[0][0] - 1} are missing; export it again")
        return HistoryContents(self._saved, tuple(self._facts), tuple(self._rows))


def _revision(value: dict[str, Any]) -> int:
    revision = value.get("revision")
    if isinstance(revision, bool) or not isinstance(revision, int) or revision < 1:
        raise InvalidInput(f"revision is {revision!r}; it must be a whole number, 1 or more")
    return revision


def _row(value: Any) -> TelemetryRow:
    if not isinstance(value, dict) or set(value) != set(_ROW_FIELDS):
        raise InvalidInput(f"telemetry must be an object with {', '.join(_ROW_FIELDS)}")
    job_id, at, kind, values = (value[name] for name in _ROW_FIELDS)
    is_time = isinstance(at, int | float) and not isinstance(at, bool) and math.isfinite(at)
    if not (isinstance(job_id, str) and isinstance(kind, str) and is_time and isinstance(values, dict)):
        raise InvalidInput("telemetry must have text as job_id and kind, a number as at, an object as values")
    return TelemetryRow(job_id, float(at), kind, values)
