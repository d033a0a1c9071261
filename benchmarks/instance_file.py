"""Reading one scheduling problem from a JSON file; docs/benchmarks.md describes the format.

Every complaint names the file, the entry, the field, the value seen and what would be right.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from pollux.core import Cluster, InvalidInput, JobLimits, JobView, Node, Placement, Snapshot
from pollux.goodput import BatchLimits, Efficiency, GoodputModel, PublishedThroughput

PARAMETERS = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
BATCH = ("initial", "maximum", "local_min", "local_max")


def read_instance(path: Path) -> tuple[Snapshot, float]:
    """A snapshot and the fairness power p to solve it with."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read as JSON ({error}); see docs/benchmarks.md for the format") from None
    if not isinstance(data, dict):
        raise InvalidInput(f"{path}: must be an object with 'nodes' and 'jobs'; see docs/benchmarks.md")
    nodes = [_node(f"{path}: nodes[{i}]", i, entry) for i, entry in enumerate(_list(path, data, "nodes"))]
    entries = [_object(f"{path}: jobs[{i}]", entry) for i, entry in enumerate(_list(path, data, "jobs"))]
    now = max(_number(f"{path}: jobs[{i}]", entry, "age", default=0.0) for i, entry in enumerate(entries))
    views: list[JobView] = []
    running: dict[str, Placement] = {}
    for i, entry in enumerate(entries):
        view, placement = _job(f"{path}: jobs[{i}]", i, entry, now, {node.id for node in nodes})
        views.append(view)
        if placement:
            running[view.id] = placement
    twice = next((name for name, count in Counter(view.id for view in views).items() if count > 1), None)
    if twice is not None:
        raise InvalidInput(f"{path}: job id '{twice}' appears twice; give every job its own")
    fairness = _number(str(path), data, "fairness", default=-1.0, minimum=-math.inf)
    return Snapshot(1, now, Cluster.of(nodes), tuple(views), running), fairness


def _list(path: Path, data: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(data.get(key), list) or not data[key]:
        raise InvalidInput(f"{path}: field '{key}' is {data.get(key)!r}; give a list with at least one entry")
    entries: list[Any] = data[key]
    return entries


def _object(where: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise InvalidInput(f"{where} is {entry!r}; give an object")
    return entry


def _number(
    where: str,
    entry: dict[str, Any],
    field: str,
    *,
    whole: bool = False,
    default: float | None = None,
    minimum: float = 0.0,
) -> float:
    value = entry.get(field, default)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= minimum
    if not good or (whole and value != int(value)):
        kind = "a whole number" if whole else "a finite number"
        bound = f", {minimum:g} or more" if math.isfinite(minimum) else ""
        raise InvalidInput(f"{where}.{field} is {value!r}; give {kind}{bound}")
    return float(value)


def _node(where: str, i: int, entry: Any) -> Node:
    entry = _object(where, {"gpus": entry} if isinstance(entry, int | float) else entry)
    gpus = int(_number(where, entry, "gpus", whole=True))
    return Node(str(entry.get("id", f"node-{i}")), gpus, isolated_network=bool(entry.get("isolated_network", False)))


def _job(where: str, i: int, entry: dict[str, Any], now: float, nodes: set[str]) -> tuple[JobView, Placement | None]:
    model = _model(where, entry)
    most = min(int(_number(where, entry, "max_gpus", whole=True, default=64, minimum=1)), model.max_gpus)
    view = JobView(
        str(entry.get("id", f"job-{i}")),
        now - _number(where, entry, "age", default=0.0),
        JobLimits(int(_number(where, entry, "min_gpus", whole=True, default=1, minimum=1)), most),
        weight=_number(where, entry, "weight", default=1.0),
        num_restarts=int(_number(where, entry, "restarts", whole=True, default=0)),
        largest_gpus=int(_number(where, entry, "largest_gpus", whole=True, default=most)),
        resize_cost_seconds=_number(where, entry, "resize_seconds", default=30.0),
        goodput=model,
    )
    return view, _placement(where, entry.get("placement"), nodes)


def _model(where: str, entry: dict[str, Any]) -> GoodputModel:
    parameters = entry.get("parameters")
    if isinstance(parameters, list) and len(parameters) == len(PARAMETERS):
        parameters = dict(zip(PARAMETERS, parameters, strict=True))
    if not isinstance(parameters, dict):
        raise InvalidInput(f"{where}.parameters is {parameters!r}; give the seven numbers {', '.join(PARAMETERS)}")
    batch = entry.get("batch")
    if not isinstance(batch, dict):
        raise InvalidInput(f"{where}.batch is {batch!r}; give {{initial, maximum, local_min, local_max}}")
    try:
        limits = BatchLimits(*(int(_number(f"{where}.batch", batch, name, whole=True)) for name in BATCH))
        times = PublishedThroughput(*(_number(f"{where}.parameters", parameters, name) for name in PARAMETERS))
        noise = Efficiency(limits.initial, 1.0, _number(where, entry, "noise_scale") / limits.initial)
    except InvalidInput as error:
        text = str(error)
        raise InvalidInput(text if text.startswith(where) else f"{where}: {text}") from None
    return GoodputModel(times, noise, limits)


def _placement(where: str, entry: Any, nodes: set[str]) -> Placement | None:
    if not entry:
        return None
    shares = _object(f"{where}.placement", entry)
    unknown = next((node for node in shares if node not in nodes), None)
    if unknown is not None:
        raise InvalidInput(f"{where}.placement names node '{unknown}', which is not among the nodes")
    return Placement.of({node: int(_number(f"{where}.placement", shares, node, whole=True)) for node in shares})
