"""Small JSON files that survive a crash: what a shim was ordered to run, and how it ended.

Also the layout of folders below the home, and the plain form of `ReplicasEnded`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pollux.backends.protocol import Exit, Outcome, ReplicasEnded
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.storage.state_file import read_json, remove_state, write_state

__all__ = [
    "check_job_id",
    "ended_from",
    "ended_to",
    "is_job_id",
    "log_folder",
    "newest_generation",
    "read_ended",
    "read_order",
    "read_record",
    "record_path",
    "remove_records",
    "run_folder",
    "write_record",
]

_log = logging.getLogger("pollux.backends")
_OUTCOMES = get_args(Outcome)
# Linux has at most 2**22.
_MAX_PIDS = 2**22 + 1
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_GENERATION = re.compile(r"generation-(\d{1,18})\.json")


def is_job_id(name: str) -> bool:
    """Whether it can be the name of a job's folder."""
    return _JOB_ID.fullmatch(name) is not None


def check_job_id(job_id: str) -> str:
    """The id itself if it can be the name of a folder; InvalidInput otherwise."""
    if not is_job_id(job_id):
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
    try:
        write_state(path, json.dumps(value).encode(), durable)
    except OSError as error:
        raise BackendFailed(f"cannot write {path}: {error.strerror}; free some space or check its rights") from error


def read_record(path: Path) -> dict[str, Any] | None:
    """The value in a file; None where there is no file, or no record in it."""
    value = read_json(path)
    return value if isinstance(value, dict) else None


def read_order(folder: Path, generation: int) -> dict[str, Any]:
    """The record of a generation that was ordered; empty where there is none, or a value is not of its kind.

    A job can write into this folder, and any other value would fail the one who uses it.
    """
    path = record_path(folder, "generation", generation)
    record = read_record(path) or {}
    replicas = record.get("replicas", [])
    is_whole = isinstance(replicas, list) and all(map(_is_replica, replicas)) and _are_words(record.get("places", []))
    if not is_whole:
        _log.warning("%s holds places or replicas that cannot be: it counts as missing", path)
    return record if is_whole else {}


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_replica(value: object) -> bool:
    """Whether it is a pid, when that started, and the pipe of its output."""
    match value:
        case [int(pid), int() | None, str() | None]:
            return 0 < pid < _MAX_PIDS
    return False


def read_ended(folder: Path, generation: int) -> ReplicasEnded | None:
    """How that generation ended; None where no record of it says so."""
    path = record_path(folder, "ended", generation)
    value = read_record(path)
    if value is None:
        return None
    try:
        ended = ended_from(value)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        _log.warning("%s does not say how generation %d ended (%r): it counts as missing", path, generation, error)
        return None
    is_of_it = (ended.job_id, ended.generation) == (folder.name, generation)
    if not is_of_it:
        _log.warning("%s speaks of '%.200s', generation %d: it counts as missing", path, ended.job_id, ended.generation)
    return ended if is_of_it else None


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
            try:
                remove_state(path)
            except OSError as error:
                _log.warning("%s cannot be removed: %s; check the rights of its folder", path, error.strerror)


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
    """The end in the plain form of `ended_to`; LookupError, TypeError or ValueError where it is none."""
    ended = ReplicasEnded(
        at=float(value["at"]),
        job_id=str(value["job_id"]),
        generation=int(value["generation"]),
        outcome=value["outcome"],
        exits=tuple(Exit(int(replica), int(code), float(at)) for replica, code, at in value["exits"]),
        detail=str(value["detail"]),
    )
    if ended.outcome not in _OUTCOMES or not all(map(math.isfinite, (ended.at, *(each.at for each in ended.exits)))):
        raise ValueError(f"outcome {ended.outcome!r:.40} at {ended.at}")
    return ended
