"""The receipt of a run: what was adapted and why, as JSON, as text and, through `receipt_plot`, as a figure.

It records what it is told; who decides, measures and checks is elsewhere in this room.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pollux.core.errors import CheckpointMismatch, InvalidInput, UnknownName

__all__ = ["EVENT_KINDS", "Receipt", "ReceiptEvent", "ReceiptRow"]

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
"""What may happen to a run."""

_SCHEMA = "pollux-receipt"
_VERSION = 1
_MAX_ROWS = 2000
_MAX_METRICS = 2000
_MAX_PASSES = 1000
# Only these come by the clock; all other kinds are changes, and kept for good.
_ROUTINE_KINDS = frozenset({"checkpointed"})
_MAX_ROUTINE = 20
_JUDGED_CHANGES = 20
_ROWS_ASIDE = 100
_FEWEST_ASIDE = 8
# Over more than this part of the way so far, loss curves (exponential, power, logarithm) are no longer quadratic
# to within their noise, and the interval misses the truth.
_SPAN_ASIDE = 0.4
_RATIOS = np.geomspace(0.2, 5.0, 81)
_COMPARED_POINTS = 20
_SMOOTHED_ROWS = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """One moment of a run. `progress`, `samples` and `seconds` count from the very beginning of the job.

    `progress` is Σ samples × efficiency in samples at the initial batch, `seconds` the time spent training,
    `throughput` the samples per second that were measured, `goodput` what the fitted model predicts for this
    configuration (measured goodput is throughput × efficiency). `lr_factors` has what the rule multiplies the rate
    of each parameter group by, `learning_rates` the rates used, base × factor. `noise_high` None: no upper bound.
    Other values that may be None are None where they are not known; what is not finite becomes None.
    """

    step: int
    progress: float
    samples: int
    seconds: float
    num_replicas: int
    num_nodes: int
    local_batch: int
    accumulation: int
    total_batch: int
    lr_factors: tuple[float, ...]
    efficiency: float
    throughput: float | None = None
    goodput: float | None = None
    noise_scale: float | None = None
    noise_low: float | None = None
    noise_high: float | None = None
    loss: float | None = None
    learning_rates: tuple[float, ...] = ()

    @property
    def configuration(self) -> tuple[int, int, int, int, int]:
        """(replicas, nodes, local batch, accumulation, total batch): what counts as a change of the run."""
        return (self.num_replicas, self.num_nodes, self.local_batch, self.accumulation, self.total_batch)


@dataclass(frozen=True, slots=True)
class ReceiptEvent:
    """Something that happened to the run, at a step and a progress; `time` in seconds since 1970, UTC."""

    kind: str
    step: int
    progress: float
    text: str
    time: float
    numbers: Mapping[str, float] = field(default_factory=dict)


_COLUMNS = tuple(column.name for column in fields(ReceiptRow))
_MAYBE_UNKNOWN = ("throughput", "goodput", "noise_scale", "noise_low", "noise_high", "loss")


class Receipt:
    """An append-only record of a run that goes on through restarts, and whose size is bounded.

    Of the rows at most about 2000 are kept: as they fill up, every second one goes, but never the first and the
    last of a configuration. Events are all kept but for checkpoints, of which the last 20 are.
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
        """The rows kept, with the newest always among them."""
        kept = [row for row, _ in self._rows]
        if self._latest is not None and (not kept or kept[-1] is not self._latest):
            kept.append(self._latest)
        return tuple(kept)

    @property
    def events(self) -> tuple[ReceiptEvent, ...]:
        """The events kept, in the order in which they happened."""
        return tuple(self._events)

    @property
    def is_exact(self) -> bool:
        """Whether the run trained exactly as the user's script would without us."""
        return self._head["mode"] == "exact" and not self._not_exact

    def sample(self, row: ReceiptRow) -> None:
        """Record a moment of the run; cheap enough for every few steps."""
        known = {name: _finite(getattr(row, name)) for name in _MAYBE_UNKNOWN}
        if any(value != getattr(row, name) for name, value in known.items()):
            row = _row({**asdict(row), **known})
        before, self._latest = self._latest, row
        if before is not None:
            self._replica_seconds += max(row.seconds - before.seconds, 0.0) * row.num_replicas
        changed = before is None or before.configuration != row.configuration
        if changed and before is not None and self._rows[-1][0] is not before:
            self._rows.append((before, True))
        elif changed and before is not None:
            self._rows[-1] = (before, True)
        if changed or self._seen % self._stride == 0:
            self._rows.append((row, changed))
        self._seen += 1
        if len(self._rows) > _MAX_ROWS:
            self._thin()

    def event(self, kind: str, step: int, progress: float, text: str, **numbers: float) -> None:
        """Record what happened, with the reason as a sentence and its figures as numbers."""
        if kind not in EVENT_KINDS:
            raise UnknownName("kind of event", kind, EVENT_KINDS)
        self._counts[kind] += 1
        self._events.append(ReceiptEvent(kind, step, progress, text, self._clock(), dict(numbers)))
        if kind in _ROUTINE_KINDS:
            routine = [event for event in self._events if event.kind == kind]
            if len(routine) > _MAX_ROUTINE:
                self._events.remove(routine[0])

    def mark_not_exact(self, reason: str, step: int = 0, progress: float = 0.0) -> None:
        """Say that the run is not exact, and why; a reason given before changes nothing."""
        if reason not in self._not_exact:
            self._not_exact.append(reason)
            self.event("not-exact", step, progress, reason)

    def last_metrics(self) -> dict[str, float]:
        """The newest value of each of the user's metrics, over all runs of the job."""
        return {name: points[-1][3] for name, points in self._metrics.items() if points}

    def log(self, values: Mapping[str, float], *, samples: int, epoch: float, progress: float) -> None:
        """Record what the user measured: numbers by name, at these samples, this epoch and this progress."""
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
        """Enter a pass into the ledger: how many samples it committed, and the hash of their indices."""
        self._ledger[index] = (samples, digest)
        if len(self._ledger) > _MAX_PASSES:
            del self._ledger[min(self._ledger)]

    def to_json(self, reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The receipt as plain values, schema `pollux-receipt`, version 1; unknown numbers are null.

        `job, mode, rule, initial_batch, max_batch, dataset_size, final_batch` say what ran; `exact` and
        `not_exact_because` whether it trained as plain PyTorch would. `configurations` has replicas, nodes and
        batch from each change on; `rows` the moments of `ReceiptRow`, a list per column, out of `rows_seen`; `events`;
        `metrics` the user's own, by name; `ledger` the samples and hash of each pass; `totals`.

        `progress` sets prediction against what happened. `predicted` is Σ samples × efficiency, which is also
        `exact_samples`, what an exact run would need; `exact_steps` are those samples at the initial batch.
        `realised` is judged by the loss alone. `changes` has, for each change of the total batch, how fast the
        loss moved on per predicted progress after it, relative to before it, with a 95 % interval: 1 means that
        the prediction held; null that noise hides it. It takes the loss to be smooth in progress, so that a
        learning-rate decay near a change blurs it. `against_reference` needs the receipt of an exact run of the
        same job: the progress at which that run first had the same smoothed loss.
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
            "metrics": {
                name: {
                    column: [_plain(point[index]) for point in points]
                    for index, column in enumerate(("samples", "epoch", "progress", "value"))
                }
                for name, points in self._metrics.items()
            },
            "ledger": [
                {"pass": index, "samples": samples, "hash": digest}
                for index, (samples, digest) in sorted(self._ledger.items())
            ],
            "progress": _plain(self._progress(rows, reference)),
            "totals": {
                "steps": 0 if last is None else last.step,
                "samples": 0 if last is None else last.samples,
                "seconds": 0.0 if last is None else last.seconds,
                "replica_seconds": self._replica_seconds,
                "events": dict(self._counts),
            },
        }

    def summary(self) -> str:
        """What was adapted and why, in at most 15 lines of text."""
        return "\n".join(_summary_lines(self.to_json())[:15])

    def write(self, folder: str | os.PathLike[str], *, reference: Mapping[str, Any] | None = None) -> list[Path]:
        """Write `receipt.json`, and `receipt.png` where matplotlib is installed and there is a row; the files written.

        Each file appears whole or not at all, and replaces the one before.
        """
        receipt = self.to_json(reference)
        written = [Path(folder) / "receipt.json"]
        # A line per entry: short to look at, and quick to compare.
        entries = (f'"{name}": {json.dumps(value, allow_nan=False)}' for name, value in receipt.items())
        _write_whole(written[0], ("{\n" + ",\n".join(entries) + "\n}\n").encode())
        if self._latest is not None and importlib.util.find_spec("matplotlib") is not None:
            from pollux.agent.reporting.receipt_plot import png

            written.append(Path(folder) / "receipt.png")
            _write_whole(written[1], png(receipt))
        return written

    def state_dict(self) -> dict[str, Any]:
        """Everything recorded, as plain values for JSON."""
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
        """Go on from a state. What the job is now (mode, batch limits, rule) stays as it was given here."""
        if state.get("version") != _VERSION:
            raise CheckpointMismatch(
                f"the receipt has version {state.get('version')}, known is {_VERSION}: "
                "resume with the release of pollux that wrote it"
            )
        # A release before this one had fewer columns.
        columns = {name: state["rows"][name] for name in _COLUMNS if name in state["rows"]}
        rows = [_row(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        self._rows = list(zip(rows, map(bool, state["kept"]), strict=True))
        self._latest = None if state["latest"] is None else _row(state["latest"])
        if rows and rows[-1] == self._latest:
            self._latest = rows[-1]
        self._seen, self._stride = int(state["seen"]), int(state["stride"])
        self._replica_seconds = float(state["replica_seconds"])
        self._events = [ReceiptEvent(**event) for event in state["events"]]
        self._counts = Counter(state["counts"])
        self._not_exact = list(state["not_exact"])
        self._metrics = {
            name: [(int(a), float(b), float(c), math.nan if d is None else float(d)) for a, b, c, d in points]
            for name, points in state["metrics"].items()
        }
        self._ledger = {int(index): (int(samples), str(digest)) for index, samples, digest in state["ledger"]}

    def _thin(self) -> None:
        """Drop every second row that is not next to a change, and take in half as many from now on."""
        free = [index for index, (_, kept) in enumerate(self._rows) if not kept]
        dropped = set(free[1::2])
        self._rows = [entry for index, entry in enumerate(self._rows) if index not in dropped]
        self._stride *= 2

    def _progress(self, rows: Sequence[ReceiptRow], reference: Mapping[str, Any] | None) -> dict[str, Any]:
        predicted = rows[-1].progress if rows else 0.0
        samples = rows[-1].samples if rows else 0
        return {
            "predicted": predicted,
            "samples": samples,
            "mean_efficiency": predicted / samples if samples else None,
            "exact_samples": predicted,
            "exact_steps": math.ceil(predicted / self._initial_batch),
            "realised": {
                "changes": list(_realised_at_changes(rows)),
                "against_reference": None if reference is None else _realised_against(rows, reference),
            },
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """The value as JSON has it: null for what is not finite, lists for tuples, numpy's numbers as plain ones."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _row(values: Mapping[str, Any]) -> ReceiptRow:
    rates = {name: tuple(values.get(name, ())) for name in ("lr_factors", "learning_rates")}
    return ReceiptRow(**{**values, **rates})


def _configurations(rows: Sequence[ReceiptRow]) -> list[dict[str, Any]]:
    """The configuration from each change on, with where it began."""
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


def _realised_at_changes(rows: Sequence[ReceiptRow]) -> Iterator[dict[str, Any]]:
    """What the loss says about each change of the total batch, the last 20 of them."""
    edges = [index for index in range(1, len(rows)) if rows[index].total_batch != rows[index - 1].total_batch]
    bounds = [0, *edges, len(rows)]
    for number, edge in list(enumerate(edges, start=1))[-_JUDGED_CHANGES:]:
        before = rows[max(bounds[number - 1], edge - _ROWS_ASIDE) : edge]
        after = rows[edge : min(bounds[number + 1], edge + _ROWS_ASIDE)]
        ratio, low, high = _realised_ratio(before, after)
        yield {
            "step": rows[edge].step,
            "progress": rows[edge].progress,
            "from_batch": rows[edge - 1].total_batch,
            "to_batch": rows[edge].total_batch,
            "realised_over_predicted": ratio,
            "low": low,
            "high": high,
        }


def _realised_ratio(
    before: Sequence[ReceiptRow], after: Sequence[ReceiptRow]
) -> tuple[float | None, float | None, float | None]:
    """The r with which loss = a + b·q + c·q² fits best, q being progress before the change and r·progress after it.

    The interval holds the r whose squared error is within the 95 % F bound of the least. Both are None where
    there are few rows, progress was rolled back, or the interval is open at an end of [0.2, 5].
    """
    edge = after[0].progress
    told = [
        [row for row in side if row.loss is not None and abs(row.progress - edge) <= _SPAN_ASIDE * edge]
        for side in (before, after)
    ]
    if min(map(len, told)) < _FEWEST_ASIDE:
        return None, None, None
    progress = np.array([row.progress - edge for side in told for row in side])
    is_after = np.repeat([False, True], [len(side) for side in told])
    loss = np.array([row.loss for side in told for row in side], dtype=float)
    span = float(np.abs(progress).max())
    if not (np.diff(progress) > 0.0).all():
        return None, None, None
    errors = np.array([_quadratic_error(np.where(is_after, r, 1.0) * progress / span, loss) for r in _RATIOS])
    best = int(errors.argmin())
    # 4 + 9/n is at least the 95 % quantile of F(1, n) from n = 12 on. A loss without any noise needs the last term.
    freedom = max(len(loss) - 4, 1)
    bound = errors[best] * (1.0 + (4.0 + 9.0 / freedom) / freedom) + 1e-12 * float(loss @ loss)
    inside = np.flatnonzero(errors <= bound)
    if inside[0] == 0 or inside[-1] == len(_RATIOS) - 1:
        return None, None, None
    return float(_RATIOS[best]), float(_RATIOS[inside[0]]), float(_RATIOS[inside[-1]])


def _quadratic_error(x: Floats, y: Floats) -> float:
    """The least sum of squares of y − (a + b·x + c·x²)."""
    columns = np.column_stack((np.ones_like(x), x, x * x))
    residual = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    return float(residual @ residual)


def _realised_against(rows: Sequence[ReceiptRow], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Where a reference run first had the losses of this one; `realised` null where it never did."""
    if reference.get("schema") != _SCHEMA or reference.get("version") != _VERSION:
        seen = f"schema '{reference.get('schema')}', version {reference.get('version')}"
        raise InvalidInput(f"the reference has {seen}: give the receipt.json of an exact run of the same job")
    other = [
        (float(progress), float(loss))
        for progress, loss in zip(reference["rows"]["progress"], reference["rows"]["loss"], strict=True)
        if loss is not None
    ]
    ours = [(row.progress, row.loss) for row in rows if row.loss is not None]
    if not other or not ours:
        return {"job": reference.get("job"), "points": []}
    lowest = np.minimum.accumulate(_smoothed([loss for _, loss in other]))
    losses = _smoothed([loss for _, loss in ours])
    chosen = np.unique(np.linspace(0, len(ours) - 1, _COMPARED_POINTS).round().astype(int))
    points = []
    for index in chosen.tolist():
        reached = np.flatnonzero(lowest <= losses[index])
        realised = other[int(reached[0])][0] if len(reached) else None
        points.append({"predicted": ours[index][0], "realised": realised, "loss": float(losses[index])})
    return {"job": reference.get("job"), "points": points}


def _smoothed(values: Sequence[float]) -> Floats:
    """A running median over four rows on either side."""
    reach = range(len(values))
    return np.array([np.median(values[max(index - _SMOOTHED_ROWS, 0) : index + _SMOOTHED_ROWS + 1]) for index in reach])


def _write_whole(path: Path, content: bytes) -> None:
    """Write beside, make durable, rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise InvalidInput(f"the receipt cannot be written to {path}: {error}; choose another folder") from None


def _summary_lines(receipt: Mapping[str, Any]) -> list[str]:
    """The text of `summary`: one fact a line, those that do not apply left out."""
    totals, progress = receipt["totals"], receipt["progress"]
    where = _where(progress["predicted"], receipt["dataset_size"])
    kept = "exact" if receipt["exact"] else "not exact" if receipt["mode"] == "exact" else "adaptive"
    lines = [f"{receipt['job']}: {kept}, {where} in {totals['steps']:,} steps and {_duration(totals['seconds'])}"]
    lines += [f"not exact: {reason}" for reason in receipt["not_exact_because"][:2]]
    if not receipt["configurations"]:
        return [*lines, "nothing was recorded yet"]
    lines.append(_batch_line(receipt))
    replicas = [entry["num_replicas"] for entry in receipt["configurations"]]
    few, many = min(replicas), max(replicas)
    held = f"{few}" if few == many else f"{few} to {many}, now {replicas[-1]}"
    lines.append(f"replicas: {held}; {_duration(totals['replica_seconds'])} of replica time")
    if receipt["mode"] == "adaptive":
        lines += _learning_lines(receipt)
    losses = [loss for loss in receipt["rows"]["loss"] if loss is not None]
    if losses:
        lines.append(f"loss: {losses[0]:.4g} at first, {losses[-1]:.4g} at last")
    lines += _event_lines(receipt)
    return lines


def _batch_line(receipt: Mapping[str, Any]) -> str:
    batches = [entry["total_batch"] for entry in receipt["configurations"]]
    factors = receipt["rows"]["lr_factors"][-1]
    limit = "" if receipt["max_batch"] is None else f", at most {receipt['max_batch']} allowed"
    rate = ", ".join(f"×{factor:.3g}" for factor in factors[:4]) or "as set"
    path = f"{receipt['initial_batch']}"
    if set(batches) != {receipt["initial_batch"]}:
        path += f" → {batches[-1]} (largest {max(batches)}{limit})"
    return f"total batch: {path}; learning rate by rule '{receipt['rule']}', now {rate}"


def _learning_lines(receipt: Mapping[str, Any]) -> list[str]:
    progress, rows = receipt["progress"], receipt["rows"]
    lines = []
    if progress["mean_efficiency"] is not None:
        lines.append(
            f"efficiency: {progress['mean_efficiency']:.3f} on average; {progress['samples']:,} samples did the "
            f"predicted work of {progress['exact_samples']:,.0f} at batch {receipt['initial_batch']}"
        )
        lines.append(f"an exact run would take {progress['exact_steps']:,} steps for it")
    low, high = rows["noise_low"][-1], rows["noise_high"][-1]
    if rows["noise_scale"][-1] is not None and high is not None:
        lines.append(f"noise scale: {rows['noise_scale'][-1]:.4g} samples, between {low or 0.0:.4g} and {high:.4g}")
    elif low is not None:
        lines.append(f"noise scale: unknown, at least {low:.4g} samples")
    told = [entry for entry in progress["realised"]["changes"] if entry["realised_over_predicted"] is not None]
    if told:
        ratios = ", ".join(
            f"{entry['realised_over_predicted']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})" for entry in told[-3:]
        )
        lines.append(f"realised over predicted progress after changes, by the loss: {ratios}")
    elif progress["realised"]["changes"]:
        lines.append("realised against predicted progress: the loss is too noisy to tell")
    return lines


def _event_lines(receipt: Mapping[str, Any]) -> list[str]:
    """How often each thing happened, then the newest reasons."""
    counts = receipt["totals"]["events"]
    lines = []
    if counts:
        lines.append("events: " + ", ".join(f"{kind} {counts[kind]}" for kind in EVENT_KINDS if kind in counts))
    telling = ("batch-changed", "resized", "out-of-memory", "rolled-back", "frozen")
    for event in [event for event in receipt["events"] if event["kind"] in telling][-4:]:
        lines.append(f"  {_where(event['progress'], receipt['dataset_size'])}: {event['kind']}: {event['text']}")
    return lines


def _where(progress: float, dataset_size: int | None) -> str:
    return f"epoch {progress / dataset_size:.2f}" if dataset_size else f"{progress:,.0f} samples of progress"


def _duration(seconds: float) -> str:
    for size, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s"
