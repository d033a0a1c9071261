"""Notes for submitters if nodes are taken back with a notice that is too short to save."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pollux.core.notice import needed_seconds
from pollux.store.protocol import TelemetryRow
from pollux.wire.report import LARGEST_SECONDS

__all__ = ["measured_seconds", "note_on_notice"]


def measured_seconds(name: str, reports: Mapping[str, TelemetryRow]) -> float | None:
    """The seconds of the last checkpoint among the `reports` of jobs of this name; None if there is none."""
    named = re.compile(rf"{re.escape(name)}(-\d+)?")
    rows = [row for job_id, row in reports.items() if named.fullmatch(job_id) and _seconds_of(row)]
    newest = max(rows, key=lambda row: row.at, default=None)
    return None if newest is None else _seconds_of(newest)


def _seconds_of(row: TelemetryRow) -> float | None:
    """What the report says, if that is a number: a stored one may say anything."""
    seconds = row.values.get("checkpoint_seconds")
    return float(seconds) if isinstance(seconds, int | float) and abs(seconds) <= LARGEST_SECONDS else None


def note_on_notice(name: str, notice: float | None, reports: Mapping[str, TelemetryRow]) -> str:
    """A note if the notice is too short for a job of this name; else empty."""
    measured = measured_seconds(name, reports)
    if notice is None or needed_seconds(measured) <= notice:
        return ""
    took = (
        "none of its checkpoints was measured yet" if measured is None else f"its last checkpoint took {measured:.3g} s"
    )
    return (
        f"nodes here are taken back with {notice:g} s of notice, and saving needs {needed_seconds(measured):.3g} s "
        f"({took}): it saves ahead of time, and repeats the work since its last checkpoint; have an administrator "
        "raise the notice (Slurm: the partition's GraceTime, or KillWait)"
    )
