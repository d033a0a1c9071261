"""Reads measurements back from the store: what is there may be older than this version, or damaged.

A row that does not fit is left out and said once; no row may take the view of other jobs away from people.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pollux.core.errors import InvalidInput
from pollux.store.protocol import Telemetry, TelemetryRow
from pollux.wire import codec
from pollux.wire.report import Report

__all__ = ["newest_reports", "sound_intervals"]

_log = logging.getLogger("pollux.service")


@dataclass(frozen=True, slots=True)
class _Issued:
    at: float
    progress: float
    low: float
    high: float
    current: float | None = None
    raw_low: float | None = None
    raw_high: float | None = None


@dataclass(frozen=True, slots=True)
class _Score:
    predictions: int = 0
    covered: float | None = None
    relative_width: float | None = None
    median_error: float | None = None
    misses: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Intervals:
    issued: tuple[_Issued, ...] = ()
    score: _Score | None = None


def _fault_of(row: TelemetryRow) -> str:
    """Why a stored report cannot be used; empty if it can."""
    try:
        codec.decode(Report, row.values, "the report")
    except InvalidInput as error:
        return f"its last report in the store cannot be read ({error}); the next one replaces it"
    return ""


def newest_reports(telemetry: Telemetry) -> tuple[dict[str, TelemetryRow], dict[str, str]]:
    """The newest report of each job, and by job what is wrong with those that cannot be used."""
    reports = telemetry.latest("report")
    faults = {job_id: fault for job_id, row in reports.items() if (fault := _fault_of(row))}
    for job_id, fault in faults.items():
        _log.warning("job '%s': %s", job_id, fault)
    return {job_id: row for job_id, row in reports.items() if job_id not in faults}, faults


def sound_intervals(telemetry: Telemetry) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """The intervals that were issued for jobs that run, and the scores of those that have ended."""
    issued: dict[str, list[dict[str, Any]]] = {}
    scores: dict[str, dict[str, Any]] = {}
    for job_id, row in telemetry.latest("eta").items():
        try:
            found = codec.decode(_Intervals, row.values, "its ETAs")
        except InvalidInput as error:
            _log.warning("job '%s': %s; its past ETAs are left out", job_id, error)
            continue
        if found.score is not None:
            scores[job_id] = _plain(found.score)
        else:
            issued[job_id] = [_plain(each) for each in found.issued]
    return issued, scores


def _plain(value: _Issued | _Score) -> dict[str, Any]:
    """The fields that are known: an interval of an earlier version has no raw one."""
    found: Mapping[str, Any] = codec.encode(value)
    return {name: each for name, each in found.items() if each is not None or not name.startswith("raw_")}
