"""Measured applications, in the layout of the published step times and training runs.

A folder per application with `placements.csv`, `scalability.csv` (optional) and `validation-B.csv` files, and an
optional `applications.json` beside them that sets batch limits.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pollux.core import InvalidInput, UnknownName
from pollux.goodput import BatchLimits
from pollux.sim.applications.application import FixedConfiguration
from pollux.sim.applications.tables import number, read_rows, text, whole

__all__ = ["DEFAULT_APPLICATIONS", "MeasuredApplication", "load_profiles"]

DEFAULT_APPLICATIONS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"initial": 12, "maximum": 384, "local_min": 4, "local_max": 12, "state_bytes": 1_300_000_000},
    "cifar10": {"initial": 128, "maximum": 4096, "local_min": 32, "local_max": 1024, "state_bytes": 90_000_000},
    "deepspeech2": {"initial": 20, "maximum": 640, "local_min": 10, "local_max": 80, "state_bytes": 300_000_000},
    "imagenet": {"initial": 200, "maximum": 12800, "local_min": 20, "local_max": 200, "state_bytes": 200_000_000},
    "ncf": {
        "initial": 256, "maximum": 32768, "local_min": 32, "local_max": 32768, "state_bytes": 20_000_000,
        "fixed": {"num_gpus": 1, "batch_size": 32768},
    },
    # More than 8 a GPU was measured, but the published runs never use it.
    "yolov3": {"initial": 8, "maximum": 512, "local_min": 4, "local_max": 8, "state_bytes": 500_000_000},
}  # fmt: skip
"""Limits of the published applications; `applications.json` overrides them and adds others.

State was not published: it is the parameters of such models (BERT-base 110 million, ResNet-18 11, ResNet-50 26, YOLOv3
62, DeepSpeech2 about 38, NeuMF about 1.6) times 12 bytes with Adam or 8 with SGD and momentum, rounded.
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """One recorded training run at a fixed total batch; entry e belongs to epoch e."""

    progress: tuple[float, ...]
    iteration: tuple[float, ...]
    grad_sqr: tuple[float, ...]
    grad_var: tuple[float, ...]


class MeasuredApplication:
    """One application whose step times and gradient noise were measured."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.name = folder.name
        self.folder = folder
        self._runs = _read_runs(folder)
        self.batch_sizes = tuple(sorted(self._runs))
        self._placements, points = _read_placements(folder)
        self.placements = tuple(self._placements)
        self.local_batches = tuple(sorted({int(batch) for table in self._placements.values() for batch in table[0]}))
        self.limits, self.fixed = self._settings(settings)
        self.state_bytes: float | None = settings.get("state_bytes")
        # An epoch is over when the fastest of the recorded runs would have ended it.
        self.progress = tuple(min(epoch) for epoch in zip(*(run.progress for run in self._runs.values()), strict=True))
        scalability = _read_scalability(folder)
        self.max_nodes = max([len(counts) for counts in self._placements] + [row[0] for row in scalability])
        self._points = points + scalability
        self._interpolator: Any = None
        self._known: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}
        self._statistics: dict[tuple[float, int], tuple[float, float]] = {}

    def _settings(self, settings: Mapping[str, Any]) -> tuple[BatchLimits, FixedConfiguration | None]:
        local = [batch for table in self._placements.values() for batch in table[0]]
        found: dict[str, Any] = {
            "initial": self.batch_sizes[0],
            "maximum": self.batch_sizes[-1],
            "local_min": int(min(local)),
            "local_max": int(max(local)),
        }
        found.update({key: value for key, value in settings.items() if key in _LIMITS})
        fixed = settings.get("fixed")
        try:
            limits = BatchLimits(**found)
        except InvalidInput as error:
            raise InvalidInput(f"{self.folder}: {error} (recorded runs and applications.json set these)") from None
        if fixed is None:
            return limits, None
        total, gpus = fixed["batch_size"], fixed["num_gpus"]
        least = max(limits.initial, gpus * limits.local_min)
        if not least <= total <= limits.maximum:
            where = f"{self.folder.parent / 'applications.json'}, application '{self.name}', field 'fixed'"
            raise InvalidInput(
                f"{where}: batch_size {total} on {gpus} GPUs: give {least} to {limits.maximum}, or fewer GPUs"
            )
        return limits, FixedConfiguration(**fixed)

    def step_and_sync_seconds(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """Measured placements are linear in the local batch; others are interpolated over nodes, GPUs and batch."""
        key = (counts, local_batch)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look_up(counts, local_batch)
        return known

    def _look_up(self, counts: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        table = self._placements.get(_normalised(counts))
        if table is not None and table[0][0] <= local_batch <= table[0][-1]:
            return float(np.interp(local_batch, table[0], table[1])), float(np.interp(local_batch, table[0], table[2]))
        nodes = min(len(counts), self.max_nodes)
        step, sync = (float(value) for value in self._interpolate(nodes, sum(counts), local_batch))
        if math.isnan(step) or math.isnan(sync):
            raise InvalidInput(
                f"{self.folder}: no measurement surrounds placement {'-'.join(map(str, counts))} ({len(counts)} nodes, "
                f"{sum(counts)} GPUs) at local batch {local_batch}; measure it, or simulate a cluster and jobs within "
                "what was measured (--nodes, --gpus-per-node, num_replicas, batch_size)"
            )
        return step, sync

    def _interpolate(self, *point: float) -> Any:
        if self._interpolator is None:
            from scipy.interpolate import LinearNDInterpolator
            from scipy.spatial import QhullError

            table = np.array(self._points)
            try:
                self._interpolator = LinearNDInterpolator(table[:, :3], table[:, 3:])
            except QhullError:
                # Too few measurements, or all in one plane.
                self._interpolator = lambda *_: np.full(2, np.nan)
        return np.ravel(self._interpolator(*point))

    def gradient_statistics(self, total_batch: float, epoch: int) -> tuple[float, float]:
        """Linear in the total batch between recorded runs, constant beyond them."""
        key = (total_batch, epoch)
        known = self._statistics.get(key)
        if known is None:
            sizes = self.batch_sizes
            sqr = np.interp(total_batch, sizes, [self._runs[size].grad_sqr[epoch] for size in sizes])
            var = np.interp(total_batch, sizes, [self._runs[size].grad_var[epoch] for size in sizes])
            known = self._statistics[key] = (float(sqr), float(var))
        return known

    def iterations(self, total_batch: int, epoch: int) -> float:
        """From the recorded run at that batch; between two runs, linear."""
        if epoch == 0:
            return 0.0
        run = self._runs.get(total_batch)
        if run is not None:
            return run.iteration[epoch - 1]
        return float(
            np.interp(
                total_batch, self.batch_sizes, [self._runs[size].iteration[epoch - 1] for size in self.batch_sizes]
            )
        )


def load_profiles(folder: Path) -> dict[str, MeasuredApplication]:
    """Every application in a profiles folder."""
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such profiles folder; give one with a folder per application")
    overrides = _read_overrides(folder / "applications.json")
    found = sorted(path for path in folder.iterdir() if path.is_dir() and (path / "placements.csv").exists())
    if not found:
        raise InvalidInput(
            f"{folder}: no application in it; each needs a folder with placements.csv and validation-B.csv"
        )
    unknown = next((name for name in overrides if name not in {path.name for path in found}), None)
    if unknown is not None:
        raise UnknownName(f"application in {folder / 'applications.json'}", unknown, [path.name for path in found])
    return {
        path.name: MeasuredApplication(
            path, {**DEFAULT_APPLICATIONS.get(path.name, {}), **overrides.get(path.name, {})}
        )
        for path in found
    }


_LIMITS = ("initial", "maximum", "local_min", "local_max")


def _read_overrides(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    example = '{"name": {"initial": 128, "fixed": {"num_gpus": 1, "batch_size": 128}}}'
    try:
        overrides = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON ({error}); write {example}") from None
    if not isinstance(overrides, dict) or not all(isinstance(value, dict) for value in overrides.values()):
        raise InvalidInput(f"{path}: must map application names to settings, like {example}")
    for name, settings in overrides.items():
        _check_numbers(f"{path}, application '{name}'", settings, (*_LIMITS, "state_bytes", "fixed"))
        fixed = settings.get("fixed")
        if fixed is not None:
            if not isinstance(fixed, dict) or set(fixed) != {"num_gpus", "batch_size"}:
                raise InvalidInput(f"{path}, application '{name}', field 'fixed': {fixed!r}: write {example}")
            _check_numbers(f"{path}, application '{name}', fixed", fixed, ("num_gpus", "batch_size"))
    return overrides


def _check_numbers(where: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for field, value in settings.items():
        if field not in known:
            raise UnknownName(f"field of {where}", field, known)
        if field != "fixed" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInput(f"{where}, field '{field}': {value!r}: give a whole number, 1 or more")


def _normalised(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The lexicographically smallest rotation: on a ring it does not matter where the numbering starts."""
    return min(counts[i:] + counts[:i] for i in range(len(counts)))


_Table = tuple[list[float], list[float], list[float]]


def _read_placements(folder: Path) -> tuple[dict[tuple[int, ...], _Table], list[tuple[float, ...]]]:
    """Step and sync time by placement and local batch; and their means by (nodes, GPUs, local batch)."""
    times: dict[tuple[int, ...], dict[float, tuple[float, float]]] = defaultdict(dict)
    for row in read_rows(folder / "placements.csv", ("placement", "local_bsz", "step_time", "sync_time")):
        digits = text(row, "placement")
        if not re.fullmatch(r"[1-9]+", digits):
            raise row.error("placement", digits, "give one digit from 1 to 9 for every node")
        counts = tuple(int(digit) for digit in digits)
        batch = float(whole(row, "local_bsz", minimum=1))
        step, sync = number(row, "step_time", above=True), number(row, "sync_time")
        if sync >= step:
            raise row.error("sync_time", f"{sync:g}", f"must be below step_time, which is {step:g}")
        times[_normalised(counts)][batch] = step, sync
    if not times:
        raise InvalidInput(f"{folder / 'placements.csv'}: no rows; give at least one measured placement")
    tables: dict[tuple[int, ...], _Table] = {}
    groups: dict[tuple[float, ...], list[tuple[float, float]]] = defaultdict(list)
    for counts, by_batch in times.items():
        batches = sorted(by_batch)
        tables[counts] = (batches, [by_batch[b][0] for b in batches], [by_batch[b][1] for b in batches])
        for batch in batches:
            groups[len(counts), sum(counts), batch].append(by_batch[batch])
    points = [(*key, *np.mean(values, axis=0).tolist()) for key, values in sorted(groups.items())]
    return tables, points


def _read_scalability(folder: Path) -> list[tuple[Any, ...]]:
    path = folder / "scalability.csv"
    if not path.exists():
        return []
    fields = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    return [
        (
            *(whole(row, field, minimum=1) for field in fields[:3]),
            number(row, "step_time", above=True),
            number(row, "sync_time"),
        )
        for row in read_rows(path, fields)
    ]


def _read_runs(folder: Path) -> dict[int, _Run]:
    runs: dict[int, _Run] = {}
    fields = ("progress", "iteration", "grad_sqr", "grad_var")
    for path in sorted(folder.glob("validation-*.csv")):
        match = re.fullmatch(r"validation-([1-9][0-9]*)", path.stem)
        if match is None:
            raise InvalidInput(f"{path}: the name has no batch size; call it validation-B.csv, B the total batch")
        rows = [
            (number(row, "progress", above=True), *(number(row, field) for field in fields[1:]))
            for row in read_rows(path, fields)
        ]
        if not rows:
            raise InvalidInput(f"{path}: no rows; give one per epoch")
        late = next((i for i in range(1, len(rows)) if rows[i][0] <= rows[i - 1][0]), None)
        if late is not None:
            raise InvalidInput(
                f"{path}, line {late + 2}, field 'progress': '{rows[late][0]:g}': is not above the line before it; "
                "give cumulative progress"
            )
        runs[int(match.group(1))] = _Run(*(tuple(column) for column in zip(*rows, strict=True)))
    if not runs:
        raise InvalidInput(f"{folder}: no validation-B.csv; give at least one recorded run")
    epochs = {len(run.progress) for run in runs.values()}
    if len(epochs) > 1:
        raise InvalidInput(f"{folder}: runs have {sorted(epochs)} epochs; give all validation-B.csv equally many rows")
    return runs
