"""The notice that nodes give before they are taken back, and what that means for a job that is submitted."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pollux.core.notice import needed_seconds
from pollux.store.protocol import TelemetryRow

__all__ = ["measured_seconds", "note_on_notice"]


def measured_seconds(name: str, reports: Mapping[str, TelemetryRow]) -> float | None:
    """How long a checkpoint of the last job of this name took, among the `reports` by job; None where none did."""
    named = re.compile(rf"{re.escape(name)}(-\d+)?")
    rows = [row for job_id, row in reports.items() if named.fullmatch(job_id) and row.values.get("checkpoint_seconds")]
    newest = max(rows, key=lambda row: row.at, default=None)
    return None if newest is None else float(newest.values["checkpoint_seconds"])


def note_on_notice(name: str, notice: float | None, reports: Mapping[str, TelemetryRow]) -> str:
    """What a submitter should know where the notice is too short for a job of this name; empty where it suffices."""
    measured = measured_seconds(name, reports)
    if notice is None or needed_seconds(measured) <= notice:
        return ""
    took = "no checkpoint of it was measured yet" if measured is None else f"its last checkpoint took {measured:.3g} s"
    return (
        f"nodes here are taken back with {notice:g} s of notice, and saving needs {needed_seconds(measured):.3g} s "
        f"({took}): it saves ahead, and what it has done since is repeated when a node goes; have an administrator "
        "raise the notice (Slurm: the partition's GraceTime, or KillWait)"
    )
