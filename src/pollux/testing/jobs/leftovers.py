"""Finds processes that a test run has left behind, by the folders that they use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["await_none", "left_in"]

_POLL_SECONDS = 0.05


def left_in(*folders: Path) -> dict[int, str]:
    """Processes with one of these folders in their command, variables, working folder or open files: number to name.

    Shims, stores, replicas and data workers all have one. This process and its ancestors are left out.
    """
    places = [str(folder.resolve()) for folder in folders]
    found, own = {}, _own()
    for entry in Path("/proc").iterdir():
        try:
            pid = int(entry.name)
            if pid not in own and any(place in text for text in _texts(entry) for place in places):
                found[pid] = (entry / "comm").read_text().strip()
        except (ValueError, OSError):
            # Not a process, a process of another user, or one that has ended meanwhile.
            continue
    return found


def await_none(seconds: float, *folders: Path) -> dict[int, str]:
    """Wait up to `seconds` for all of them to end; returns those that are left."""
    until = time.monotonic() + seconds
    while (left := left_in(*folders)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return left


def _texts(entry: Path) -> Iterator[str]:
    if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
        return
    yield (entry / "cmdline").read_bytes().decode(errors="replace")
    yield (entry / "environ").read_bytes().decode(errors="replace")
    yield os.readlink(entry / "cwd")
    for descriptor in (entry / "fd").iterdir():
        yield os.readlink(descriptor)


def _own() -> set[int]:
    """This process and its ancestors."""
    found, pid = set(), os.getpid()
    while pid > 0:
        found.add(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found
