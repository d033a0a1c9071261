"""Small JSON files that survive a crash: what a shim was ordered to run, and how it ended.

Also the layout of folders below the home, and the plain form of `ReplicasEnded`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pollux.backends.protocol import Exit, ReplicasEnded
from pollux.core.errors import BackendFailed, InvalidInput

__all__ = [
    "check_job_id",
    "ended_from",
    "ended_to",
    "log_folder",
    "newest_generation",
    "read_record",
    "record_path",
    "remove_records",
    "run_folder",
    "write_record",
]

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GENERATION = re.compile(r"generation-(\d{1,18})\.json")


def check_job_id(job_id: str) -> str:
    """The id itself if it can be the name of a folder; InvalidInput otherwise."""
    if not _JOB_ID.fullmatch(job_id):
        raise InvalidInput(
            f"job id {job_id[:140]!r} cannot name a folder: use letters, digits, '.', '_' and '-', at most 128 in all, "
            "beginning with a letter or digit"
        )
    return job_id


def run_folder(home: Path, job_id: str) -> Path:
    """Where a job's shim keeps its socket, lock and records."""
    return home / "run" / job_id


def log_folder(home: Path, job_id: str) -> Path:
    """The folder of the logs of a job's replicas."""
    return home / "logs" / job_id


def record_path(folder: Path, kind: str, generation: int) -> Path:
    """The file of one record; `kind` is `generation` for an order, `ended`, or `ran`."""
    return folder / f"{kind}-{generation}.json"


def write_record(path: Path, value: Mapping[str, Any], durable: bool = True) -> None:
    """Write a value so that a crash leaves the new file or the old one; also a crash of the machine if `durable`."""
    beside = path.with_suffix(".tmp")
    try:
        with open(beside, "w") as file:
            json.dump(value, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(beside, path)
        if not durable:
            return
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise BackendFailed(f"cannot write {path}: {error.strerror}; free some space or check its rights") from error


def read_record(path: Path) -> dict[str, Any] | None:
    """The value in a file; None where there is no file, or no record in it."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else None
    return None


def newest_generation(folder: Path) -> int | None:
    """The highest generation that was ordered in this folder; None for none."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    found = [int(match.group(1)) for name in names if (match := _GENERATION.fullmatch(name))]
    return max(found, default=None)


def remove_records(folder: Path, before: int | None = None) -> None:
    """Remove the records in this folder; where `before` is given, only those of earlier generations."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        kind, _, number = path.stem.rpartition("-")
        if kind in ("generation", "ended", "ran") and number.isdigit() and (before is None or int(number) < before):
            path.unlink(missing_ok=True)


def ended_to(ended: ReplicasEnded) -> dict[str, Any]:
    """The plain form of an end."""
    return {
        "at": ended.at,
        "job_id": ended.job_id,
        "generation": ended.generation,
        "outcome": ended.outcome,
        "exits": [[exit_.replica, exit_.code, exit_.at] for exit_ in ended.exits],
        "detail": ended.detail,
    }


def ended_from(value: Mapping[str, Any]) -> ReplicasEnded:
    """The end in the plain form of `ended_to`."""
    return ReplicasEnded(
        at=float(value["at"]),
        job_id=value["job_id"],
        generation=int(value["generation"]),
        outcome=value["outcome"],
        exits=tuple(Exit(int(replica), int(code), float(at)) for replica, code, at in value["exits"]),
        detail=value["detail"],
    )
