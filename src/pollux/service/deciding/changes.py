"""How snapshots and decisions travel to the decision process and back: as what has changed since the last ones.

A whole snapshot of 1,000 jobs takes longer to write than a decision takes to make, and nothing else runs in the
service meanwhile. So only changes are written, a few jobs at a time.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from pollux.core import Decision, JobView, Placement, Snapshot

__all__ = ["DecisionReader", "DecisionWriter", "KeptMemory", "SnapshotReader", "SnapshotWriter", "memory_of"]

# Pickling is one operation for the interpreter, which no other thread can interrupt; this many take about 0.3 ms.
_AT_ONCE = 64
_FIELDS = tuple(field.name for field in fields(JobView))
_PRIOR = _FIELDS.index("prior")
_values_of = attrgetter(*_FIELDS)
_MISSING = object()


@dataclass(frozen=True, slots=True, eq=False)
class KeptMemory:
    """A policy's memory as the decision process wrote it; that process knows it by its number."""

    number: int
    written: bytes


def memory_of(snapshot: Snapshot) -> Snapshot:
    """The snapshot as a policy in this process needs it: with its memory read."""
    kept = snapshot.memory
    return replace(snapshot, memory=pickle.loads(kept.written)) if isinstance(kept, KeptMemory) else snapshot


def _written(items: Iterable[Any]) -> list[bytes]:
    """The items, a few in each piece."""
    rest = iter(items)
    return [_dumps(piece) for piece in iter(lambda: list(islice(rest, _AT_ONCE)), [])]


def _read(pieces: Iterable[bytes]) -> Iterator[Any]:
    for piece in pieces:
        yield from pickle.loads(piece)


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


class SnapshotWriter:
    """Writes snapshots for one `SnapshotReader`, which must read all of them in their order."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, ...]] = {}
        self._running: dict[str, Placement] = {}
        self._order: tuple[str, ...] = ()
        self._shared: dict[str, Any] = {}
        self._priors: dict[int, tuple[int, object]] = {}
        self._num_priors = 0

    def write(self, snapshot: Snapshot, known_memory: int = 0) -> bytes:
        """What is new in the snapshot. The memory that the reader knows by that number is not written."""
        values = {job.id: _values_of(job) for job in snapshot.jobs}
        new_priors = self._number_priors(values.values())
        order = tuple(values)
        if len(order) != len(snapshot.jobs):
            raise ValueError("two jobs of a snapshot have one name")
        parts: dict[str, Any] = {
            "numbers": (snapshot.revision, snapshot.now, snapshot.seed),
            "priors": (
                list(new_priors),
                _written(new_priors.values()),
                [number for number, _ in self._priors.values()],
            ),
            "jobs": _written(self._changed(values)),
            "placed": _written(self._moved(snapshot.running)),
            "memory": _memory_part(snapshot.memory, known_memory),
        }
        if order != self._order:
            parts["order"] = order
        if tuple(job_id for job_id in order if job_id in snapshot.running) != tuple(snapshot.running):
            parts["running_order"] = tuple(snapshot.running)
        for name in ("cluster", "queues"):
            value = getattr(snapshot, name)
            if self._shared.get(name, _MISSING) is not value:
                parts[name] = self._shared[name] = value
        self._values, self._order, self._running = values, order, dict(snapshot.running)
        return _dumps(parts)

    def _number_priors(self, rows: Iterable[tuple[Any, ...]]) -> dict[int, object]:
        """Give each prior a number: it is large, and all jobs of a kind share one. Returns the new priors by number."""
        used: dict[int, tuple[int, object]] = {}
        new: dict[int, object] = {}
        for row in rows:
            prior = row[_PRIOR]
            if prior is None or id(prior) in used:
                continue
            known = self._priors.get(id(prior))
            if known is None:
                self._num_priors += 1
                known = self._num_priors, prior
                new[self._num_priors] = prior
            used[id(prior)] = known
        self._priors = used
        return new

    def _changed(self, rows: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, bool, dict[int, Any]]]:
        """Jobs that are new or have changed: (id, new, values by the number of the field)."""
        for job_id, row in rows.items():
            before = self._values.get(job_id)
            if before is None:
                yield job_id, True, self._numbered(dict(enumerate(row)))
                continue
            changed = {i: value for i, (value, last) in enumerate(zip(row, before, strict=True)) if value is not last}
            if changed:
                yield job_id, False, self._numbered(changed)

    def _numbered(self, values: dict[int, Any]) -> dict[int, Any]:
        prior = values.get(_PRIOR)
        if prior is not None:
            values[_PRIOR] = self._priors[id(prior)][0]
        return values

    def _moved(self, running: Mapping[str, Placement]) -> Iterator[tuple[str, Placement | None]]:
        before = self._running
        yield from ((job_id, place) for job_id, place in running.items() if before.get(job_id) is not place)
        yield from ((job_id, None) for job_id in before if job_id not in running)


def _memory_part(memory: object, known: int) -> tuple[str, Any]:
    if isinstance(memory, KeptMemory):
        return ("known", memory.number) if memory.number == known else ("written", memory.written)
    return "written", _dumps(memory)


class SnapshotReader:
    """Reads what one `SnapshotWriter` wrote. Values that did not change are the same objects again."""

    def __init__(self) -> None:
        self._views: dict[str, JobView] = {}
        self._order: tuple[str, ...] = ()
        self._running: dict[str, Placement] = {}
        self._priors: dict[int, Any] = {}
        self._shared: dict[str, Any] = {}

    def read(self, written: bytes, memory: tuple[int, object] = (0, None)) -> Snapshot:
        """The snapshot; `memory` is the newest that this process has made, and its number."""
        parts = pickle.loads(written)
        self._read_priors(*parts["priors"])
        self._read_jobs(parts["jobs"], parts.get("order"))
        for job_id, place in _read(parts["placed"]):
            self._running.pop(job_id, None)
            if place is not None:
                self._running[job_id] = place
        self._shared |= {name: parts[name] for name in ("cluster", "queues") if name in parts}
        order = parts.get("running_order", [job_id for job_id in self._order if job_id in self._running])
        revision, now, seed = parts["numbers"]
        return Snapshot(
            revision, now, self._shared["cluster"], tuple(self._views.values()),
            {job_id: self._running[job_id] for job_id in order}, self._shared["queues"], seed,
            _memory_from(parts["memory"], memory),
        )  # fmt: skip

    def _read_jobs(self, pieces: Iterable[bytes], order: tuple[str, ...] | None) -> None:
        for job_id, is_new, values in _read(pieces):
            named = {_FIELDS[i]: self._priors[value] if i == _PRIOR and value else value for i, value in values.items()}
            self._views[job_id] = JobView(**named) if is_new else replace(self._views[job_id], **named)
        if order is not None:
            self._order, self._views = order, {job_id: self._views[job_id] for job_id in order}

    def _read_priors(self, new: Sequence[int], pieces: Iterable[bytes], used: Iterable[int]) -> None:
        self._priors |= dict(zip(new, _read(pieces), strict=True))
        self._priors = {number: self._priors[number] for number in used}


def _memory_from(part: tuple[str, Any], newest: tuple[int, object]) -> object:
    kind, value = part
    if kind == "written":
        return pickle.loads(value)
    number, memory = newest
    if value != number:
        raise ValueError(f"the memory is to be number {value}; this process has {number}")
    return memory


class DecisionWriter:
    """Writes decisions, in the decision process."""

    def write(self, decision: Decision, snapshot: Snapshot, number: int) -> bytes:
        """The decision about that snapshot; its memory gets the number. Unchanged placements are only named."""
        placed = ((job_id, None if place == snapshot.running.get(job_id) else place)
                  for job_id, place in decision.allocation.items())  # fmt: skip
        return _dumps(
            (
                _written(placed),
                decision.desired_nodes,
                _written(decision.reasons.items()),
                number,
                _dumps(decision.memory),
            )
        )


class DecisionReader:
    """Reads decisions, in the service."""

    def read(self, written: bytes, snapshot: Snapshot) -> Decision:
        """The decision about that snapshot."""
        placed, desired_nodes, reasons, number, memory = pickle.loads(written)
        allocation = {job_id: snapshot.running[job_id] if place is None else place for job_id, place in _read(placed)}
        return Decision(allocation, desired_nodes, dict(_read(reasons)), KeptMemory(number, memory))
