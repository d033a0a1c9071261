"""The files and folders in the service's home."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pollux.core.errors import InvalidInput

__all__ = [
    "ca_file",
    "checkpoint_folder",
    "home",
    "log_file",
    "receipt_folder",
    "service_file",
    "store_file",
    "telemetry_file",
    "token_file",
]


def home(environ: Mapping[str, str]) -> Path:
    """The service's folder, absolute: `POLLUX_HOME`, or `~/.local/state/pollux` if that is unset or empty."""
    named = environ.get("POLLUX_HOME", "")
    try:
        return (Path(named).expanduser() if named else Path.home() / ".local" / "state" / "pollux").absolute()
    except RuntimeError as error:
        raise InvalidInput(f"POLLUX_HOME is '{named}', and there is no home folder: set it to a folder") from error


def service_file(home: Path) -> Path:
    """The address of the running service: JSON with `url`, `pid`, `started_at` and `version`."""
    return home / "service.json"


def log_file(home: Path) -> Path:
    """The log of a service in the background."""
    return home / "service.log"


def ca_file(home: Path) -> Path:
    """The certificate of the service, if it has one; commands and agents on this machine trust it."""
    return home / "ca.pem"


def token_file(home: Path) -> Path:
    """The operator's token; readable by its owner only (mode 0600)."""
    return home / "token"


def store_file(home: Path) -> Path:
    """The log of facts and its snapshots."""
    return home / "store.sqlite"


def telemetry_file(home: Path) -> Path:
    """Series of reports, apart from the facts."""
    return home / "telemetry.sqlite"


def checkpoint_folder(home: Path, job_id: str) -> Path:
    """A job's checkpoints, if its file names no folder."""
    return home / "checkpoints" / _part(job_id)


def receipt_folder(home: Path, job_id: str) -> Path:
    """A job's receipt."""
    return home / "receipts" / _part(job_id)


def _part(job_id: str) -> str:
    """The id as one part of a path; InvalidInput if it could be more."""
    if not job_id or job_id.startswith(".") or "/" in job_id or "\0" in job_id:
        raise InvalidInput(f"job id {job_id!r:.80} cannot name a folder: give the id of a job")
    return job_id
