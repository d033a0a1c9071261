"""The receipt of a run: what was adapted and why. It grows during the run and is written as JSON.

`receipt_text` makes its summary, `receipt_plot` its figure.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pollux.agent.adaptation.state_version import require_version
from pollux.agent.reporting.realised import realised_against, realised_at_changes
from pollux.agent.reporting.receipt_row import ReceiptEvent, ReceiptRow, finite
from pollux.agent.reporting.receipt_text import summary
from pollux.agent.reporting.said_once import SaidOnce
from pollux.core.errors import InvalidInput, UnknownName
from pollux.storage.state_file import write_state

__all__ = ["EVENT_KINDS", "Receipt"]

EVENT_KINDS = (
    "started",
    "resumed",
    "batch-changed",
    "resized",
    "out-of-memory",
    "rolled-back",
    "frozen",
    "checkpointed",
    "not-exact",
    "not-saved",
    "stopped",
    "finished",
)
"""The kinds of events in a receipt."""

_SCHEMA = "pollux-receipt"
_VERSION = 1
_MAX_ROWS = 2000
_MAX_METRICS = 2000
_MAX_PASSES = 1000
# Events of these kinds come by the clock, and only the last ones are kept; all events of other kinds are kept.
_ROUTINE_KINDS = frozenset({"checkpointed"})
_MAX_ROUTINE = 20
_COLUMNS = tuple(column.name for column in fields(ReceiptRow))
_MAYBE_UNKNOWN = ("throughput", "goodput", "noise_scale", "noise_low", "noise_high", "loss")


class Receipt:
    """An append-only record of a run, restarts included, of bounded size.

    It keeps at most about 2000 rows: when there are more, it drops every second one, but never the first or the last
    row of a configuration. It keeps all events but checkpoints, of which it keeps the last 20.
    """

    def __init__(
        self,
        job: str,
        *,
        mode: Literal["exact", "adaptive"],
        initial_batch: int,
        max_batch: int | None = None,
        rule: str = "none",
        dataset_size: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if mode not in ("exact", "adaptive"):
            raise UnknownName("mode", mode, ("exact", "adaptive"))
        if initial_batch < 1:
            raise InvalidInput(f"initial_batch is {initial_batch}: give the number of samples, 1 or more")
        self._initial_batch = initial_batch
        self._head: dict[str, Any] = {
            "job": job,
            "mode": mode,
            "rule": rule,
            "initial_batch": initial_batch,
            "max_batch": max_batch,
            "dataset_size": dataset_size,
        }
        self._clock = clock
        self._unwritten = SaidOnce()
        self._rows: list[tuple[ReceiptRow, bool]] = []
        self._latest: ReceiptRow | None = None
        self._seen = 0
        self._stride = 1
        self._replica_seconds = 0.0
        self._events: list[ReceiptEvent] = []
        self._counts: Counter[str] = Counter()
        self._not_exact: list[str] = []
        self._metrics: dict[str, list[tuple[int, float, float, float]]] = {}
        self._ledger: dict[int, tuple[int, str]] = {}

    @property
    def rows(self) -> tuple[ReceiptRow, ...]:
        """The rows that are kept; the newest row is always one of them."""
        kept = [row for row, _ in self._rows]
        if self._latest is not None and (not kept or kept[-1] is not self._latest):
            kept.append(self._latest)
        return tuple(kept)

    @property
    def events(self) -> tuple[ReceiptEvent, ...]:
        """The events that are kept, in the order in which they happened."""
        return tuple(self._events)

    @property
    def is_exact(self) -> bool:
        """Whether the run trained exactly as the user's script would without Pollux."""
        return self._head["mode"] == "exact" and not self._not_exact

    def sample(self, row: ReceiptRow) -> None:
        """Add a row; this is cheap enough to be done every few steps."""
        row = _with_finite_values(row)
        before, self._latest = self._latest, row
        if before is not None:
            self._replica_seconds += max(row.seconds - before.seconds, 0.0) * row.num_replicas
        changed = before is None or before.configuration != row.configuration
        if changed and before is not None:
            self._keep_last_of_configuration(before)
        if changed or self._seen % self._stride == 0:
            self._rows.append((row, changed))
        self._seen += 1
        if len(self._rows) > _MAX_ROWS:
            self._thin()

    def _keep_last_of_configuration(self, row: ReceiptRow) -> None:
        if self._rows[-1][0] is row:
            self._rows.pop()
        self._rows.append((row, True))

    def event(self, kind: str, step: int, progress: float, text: str, **numbers: float) -> None:
        """Add an event: the reason as a sentence, its figures as numbers."""
        if kind not in EVENT_KINDS:
            raise UnknownName("kind of event", kind, EVENT_KINDS)
        self._counts[kind] += 1
        self._events.append(ReceiptEvent(kind, step, progress, text, self._clock(), dict(numbers)))
        if kind in _ROUTINE_KINDS:
            routine = [event for event in self._events if event.kind == kind]
            if len(routine) > _MAX_ROUTINE:
                self._events.remove(routine[0])

    def mark_not_exact(self, reason: str, step: int = 0, progress: float = 0.0) -> None:
        """Mark the run as not exact, with a reason; a reason that is known already changes nothing."""
        if reason not in self._not_exact:
            self._not_exact.append(reason)
            self.event("not-exact", step, progress, reason)

    def last_metrics(self) -> dict[str, float]:
        """The newest value of each of the user's metrics, earlier starts of the job included."""
        return {name: points[-1][3] for name, points in self._metrics.items() if points}

    def log(self, values: Mapping[str, float], *, samples: int, epoch: float, progress: float) -> None:
        """Add the user's metrics by name, as of these samples, this epoch and this progress."""
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise InvalidInput(f"metric '{name}' is {value!r}: log numbers, one value each") from None
            points = self._metrics.setdefault(name, [])
            points.append((samples, epoch, progress, number))
            if len(points) > _MAX_METRICS:
                del points[-2::-2]

    def close_pass(self, index: int, samples: int, digest: str) -> None:
        """Add a pass to the ledger: how many samples it committed, and the hash of their indices."""
        self._ledger[index] = (samples, digest)
        if len(self._ledger) > _MAX_PASSES:
            del self._ledger[min(self._ledger)]

    def to_json(self, reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The receipt as plain values, schema `pollux-receipt`, version 1; unknown numbers are null.

        `job, mode, rule, initial_batch, max_batch, dataset_size, final_batch` say what ran; `exact` and
        `not_exact_because` whether it trained as plain PyTorch would. `configurations` has replicas, nodes and
        batch from each change on; `rows` the moments of `ReceiptRow`, a list per column, out of `rows_seen`; `events`;
        `metrics` the user's own, by name; `ledger` the samples and hash of each pass; `totals`.

        `progress` compares the predicted progress with the loss. `predicted` is Σ samples × efficiency; an exact run
        would need as many samples, `exact_samples`, in `exact_steps` steps at the initial batch. `realised` follows
        from the loss alone. Its `changes` has an entry for each change of the total batch: how fast the loss fell per
        predicted progress after the change, relative to before it, with a 95 % interval. 1 means that the prediction
        held, null that the loss is too noisy to tell. The loss is assumed to be smooth in progress, so a decay of the
        learning rate near a change disturbs the figure. `against_reference` needs the receipt of an exact run of the
        same job: it has the progress at which that run first had the same smoothed loss.
        """
        rows = self.rows
        last = self._latest
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            **self._head,
            "final_batch": self._initial_batch if last is None else last.total_batch,
            "exact": self.is_exact,
            "not_exact_because": list(self._not_exact),
            "configurations": _configurations(rows),
            "rows_seen": self._seen,
            "rows": {name: [_plain(getattr(row, name)) for row in rows] for name in _COLUMNS},
            "events": [_plain(asdict(event)) for event in self._events],
            "metrics": {name: _metric_columns(points) for name, points in self._metrics.items()},
            "ledger": [
                {"pass": index, "samples": samples, "hash": digest}
                for index, (samples, digest) in sorted(self._ledger.items())
            ],
            "progress": _plain(self._progress(rows, reference)),
            "totals": {
                **({"steps": 0, "samples": 0, "seconds": 0.0} if last is None else _totals(last)),
                "replica_seconds": self._replica_seconds,
                "events": dict(self._counts),
            },
        }

    def summary(self) -> str:
        """The receipt as at most 15 lines of text."""
        return summary(self.to_json(), EVENT_KINDS)

    def write(self, folder: str | os.PathLike[str], *, reference: Mapping[str, Any] | None = None) -> list[Path]:
        """Write `receipt.json`, and `receipt.png` where matplotlib is installed and there is a row; their paths.

        Each file is replaced as a whole: a reader finds the old one or the new one.
        """
        receipt = self.to_json(reference)
        written = [Path(folder) / "receipt.json"]
        # One line for each entry, so that the file is easy to read and to compare.
        entries = (f'"{name}": {json.dumps(value, allow_nan=False)}' for name, value in receipt.items())
        _write_whole(written[0], ("{\n" + ",\n".join(entries) + "\n}\n").encode())
        if self._latest is not None and importlib.util.find_spec("matplotlib") is not None:
            from pollux.agent.reporting.receipt_plot import png

            # The picture shows what the other file says, so nothing is lost if the library cannot draw.
            with self._unwritten.tolerated(f"the picture of the receipt in {folder}"):
                _write_whole(Path(folder) / "receipt.png", png(receipt))
                written.append(Path(folder) / "receipt.png")
        return written

    def state_dict(self) -> dict[str, Any]:
        """The whole receipt as plain values for JSON."""
        return {
            "version": _VERSION,
            "head": dict(self._head),
            "rows": {name: [_plain(getattr(row, name)) for row, _ in self._rows] for name in _COLUMNS},
            "kept": [kept for _, kept in self._rows],
            "latest": None if self._latest is None else _plain(asdict(self._latest)),
            "seen": self._seen,
            "stride": self._stride,
            "replica_seconds": self._replica_seconds,
            "events": [_plain(asdict(event)) for event in self._events],
            "counts": dict(self._counts),
            "not_exact": list(self._not_exact),
            "metrics": {name: [_plain(list(point)) for point in points] for name, points in self._metrics.items()},
            "ledger": [[index, samples, digest] for index, (samples, digest) in self._ledger.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the receipt of a state. Mode, batch limits and rule stay those given to the constructor."""
        require_version("the receipt", state, _VERSION)
        rows = _rows_from(state["rows"])
        self._rows = list(zip(rows, map(bool, state["kept"]), strict=True))
        self._latest = None if state["latest"] is None else _row(state["latest"])
        if rows and rows[-1] == self._latest:
            self._latest = rows[-1]
        self._seen, self._stride = int(state["seen"]), int(state["stride"])
        self._replica_seconds = float(state["replica_seconds"])
        self._events = [ReceiptEvent(**event) for event in state["events"]]
        self._counts = Counter(state["counts"])
        self._not_exact = list(state["not_exact"])
        self._metrics = {name: _metric_points(points) for name, points in state["metrics"].items()}
        self._ledger = {int(index): (int(samples), str(digest)) for index, samples, digest in state["ledger"]}

    def _thin(self) -> None:
        """Drop every second row that is not next to a change, and add half as many rows from now on."""
        free = [index for index, (_, kept) in enumerate(self._rows) if not kept]
        dropped = set(free[1::2])
        self._rows = [entry for index, entry in enumerate(self._rows) if index not in dropped]
        self._stride *= 2

    def _progress(self, rows: Sequence[ReceiptRow], reference: Mapping[str, Any] | None) -> dict[str, Any]:
        if reference is not None:
            _require_receipt(reference)
        predicted = rows[-1].progress if rows else 0.0
        samples = rows[-1].samples if rows else 0
        return {
            "predicted": predicted,
            "samples": samples,
            "mean_efficiency": predicted / samples if samples else None,
            "exact_samples": predicted,
            "exact_steps": math.ceil(predicted / self._initial_batch),
            "realised": {
                "changes": list(realised_at_changes(rows)),
                "against_reference": None if reference is None else realised_against(rows, reference),
            },
        }


def _require_receipt(reference: Mapping[str, Any]) -> None:
    if reference.get("schema") != _SCHEMA or reference.get("version") != _VERSION:
        seen = f"schema '{reference.get('schema')}', version {reference.get('version')}"
        raise InvalidInput(f"the reference has {seen}: give the receipt.json of an exact run of the same job")


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: None where it is not finite, lists for tuples, plain numbers for numpy's."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _row(values: Mapping[str, Any]) -> ReceiptRow:
    rates = {name: tuple(values.get(name, ())) for name in ("lr_factors", "learning_rates")}
    return ReceiptRow(**{**values, **rates})


def _with_finite_values(row: ReceiptRow) -> ReceiptRow:
    """The row, with None for measurements that are not finite."""
    known = {name: finite(getattr(row, name)) for name in _MAYBE_UNKNOWN}
    if all(value == getattr(row, name) for name, value in known.items()):
        return row
    return _row({**asdict(row), **known})


def _rows_from(saved: Mapping[str, Sequence[Any]]) -> list[ReceiptRow]:
    """Rows from a list for each column; a checkpoint on disk may lack the columns that were added later."""
    columns = {name: saved[name] for name in _COLUMNS if name in saved}
    return [_row(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _metric_columns(points: Sequence[tuple[int, float, float, float]]) -> dict[str, list[Any]]:
    columns = enumerate(("samples", "epoch", "progress", "value"))
    return {column: [_plain(point[index]) for point in points] for index, column in columns}


def _metric_points(saved: Sequence[Sequence[Any]]) -> list[tuple[int, float, float, float]]:
    return [(int(a), float(b), float(c), math.nan if d is None else float(d)) for a, b, c, d in saved]


def _totals(last: ReceiptRow) -> dict[str, Any]:
    return {"steps": last.step, "samples": last.samples, "seconds": last.seconds}


def _configurations(rows: Sequence[ReceiptRow]) -> list[dict[str, Any]]:
    """Each configuration, with the step, progress, samples and seconds at which it began."""
    starts = [row for index, row in enumerate(rows) if index == 0 or row.configuration != rows[index - 1].configuration]
    names = ("num_replicas", "num_nodes", "local_batch", "accumulation", "total_batch")
    return [
        {
            "step": row.step,
            "progress": _plain(row.progress),
            "samples": row.samples,
            "seconds": _plain(row.seconds),
            **dict(zip(names, row.configuration, strict=True)),
        }
        for row in starts
    ]


def _write_whole(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_state(path, content, mode=0o666)
    except OSError as error:
        raise InvalidInput(f"the receipt cannot be written to {path}: {error}; choose another folder") from None
