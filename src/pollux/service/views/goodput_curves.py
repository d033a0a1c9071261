"""Predictions of jobs' models for pages: goodput at the placement, packed on k GPUs, and under a static allocation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pollux.controller import JobRecord
from pollux.core import Cluster, GoodputFunction, JobLimits
from pollux.goodput import GoodputModel

__all__ = ["goodput", "largest_nodes", "packed", "placed", "points_of", "static_model", "suitable"]

_MOST_POINTS = 48
_LEAST_SHOWN = 8
_largest: tuple[Cluster, Mapping[str, int]] | None = None


@lru_cache(maxsize=100_000)
def _known(model: GoodputFunction, num_nodes: int, num_gpus: int, gpu_type: str) -> float:
    return model.goodput(num_nodes, num_gpus, gpu_type)


def goodput(model: GoodputFunction, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
    """Useful samples per second, cached, since pages are read far more often than models change."""
    try:
        return _known(model, num_nodes, num_gpus, gpu_type)  # type: ignore[arg-type]
    except TypeError:
        return model.goodput(num_nodes, num_gpus, gpu_type)


@lru_cache(maxsize=20_000)
def _fixed(model: GoodputModel) -> GoodputModel:
    return replace(model, limits=replace(model.limits, maximum=model.limits.initial))


def static_model(model: GoodputFunction) -> GoodputFunction:
    """The model with the batch fixed at the initial one; other models are returned unchanged."""
    return _fixed(model) if isinstance(model, GoodputModel) else model


def largest_nodes(cluster: Cluster) -> Mapping[str, int]:
    """GPUs of the largest node of each type; cached for the last cluster."""
    global _largest
    known = _largest
    if known is None or known[0] is not cluster:
        known = _largest = cluster, _largest_of(cluster)
    return known[1]


def _largest_of(cluster: Cluster) -> Mapping[str, int]:
    largest: dict[str, int] = {}
    for node in cluster.nodes:
        largest[node.gpu_type] = max(node.num_gpus, largest.get(node.gpu_type, 0))
    return {kind: gpus for kind, gpus in largest.items() if gpus}


def suitable(largest: Mapping[str, int], limits: JobLimits) -> Mapping[str, int]:
    """The largest nodes whose type the job accepts."""
    if not limits.gpu_types:
        return largest
    return {kind: gpus for kind, gpus in largest.items() if limits.takes_type(kind)}


def packed(model: GoodputFunction, count: int, largest: Mapping[str, int]) -> float:
    """Goodput on as few nodes as can hold `count` GPUs, on the type that suits best; 0 if it cannot run."""
    found = (goodput(model, math.ceil(count / gpus), count, gpu_type) for gpu_type, gpus in largest.items())
    return max(found, default=0.0)


def placed(record: JobRecord, cluster: Cluster) -> float | None:
    """The predicted goodput at the job's placement; None without GPUs or without a model."""
    if record.goodput is None or not record.placement:
        return None
    node = cluster.by_id.get(record.placement.shares[0][0])
    kind = "" if node is None else node.gpu_type
    return goodput(record.goodput, record.placement.num_nodes, record.placement.num_gpus, kind)


def points_of(record: JobRecord, cluster: Cluster) -> list[dict[str, Any]] | None:
    """Goodput, speed-up over the fewest GPUs and best batch, for k GPUs.

    Up to twice the maximum of the job, within the cluster; None before its agent has learned a model.
    """
    model, limits = record.goodput, record.spec.limits
    largest = suitable(largest_nodes(cluster), limits)
    if model is None or not largest:
        return None
    rows: list[dict[str, Any]] = []
    for count in _counts(min(max(2 * limits.max_gpus, _LEAST_SHOWN), max(cluster.num_gpus, 1)), record):
        rate = packed(model, count, largest)
        if rate > 0.0:
            rows.append({"gpus": count, "goodput": rate, "batch_size": _batch(model, count, largest)})
    least = rows[0]["goodput"] if rows else 1.0
    return [{**row, "speedup": row["goodput"] / least} for row in rows]


def _counts(most: int, record: JobRecord) -> list[int]:
    """All numbers up to `most` if they are few, else evenly on a logarithmic axis, with the important ones."""
    if most <= _MOST_POINTS:
        return list(range(1, most + 1))
    steps = {round(most ** (index / (_MOST_POINTS - 1))) for index in range(_MOST_POINTS)}
    limits = record.spec.limits
    named = {limits.min_gpus, limits.max_gpus, record.placement.num_gpus}
    return sorted(count for count in steps | named if 1 <= count <= most)


def _batch(model: GoodputFunction, count: int, largest: Mapping[str, int]) -> int | None:
    if not isinstance(model, GoodputModel):
        return None
    kind = max(largest, key=lambda name: goodput(model, math.ceil(count / largest[name]), count, name))
    return model.best_batch(math.ceil(count / largest[kind]), count, kind)[0].total
