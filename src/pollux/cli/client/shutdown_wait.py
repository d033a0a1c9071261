"""Waits until a service has ended, and reports the jobs that the service waits for."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.core.errors import PolluxError, Unreachable
from pollux.wire import home_layout

if TYPE_CHECKING:
    from pollux.cli.client.client import Client

__all__ = ["Ending", "is_alive"]

_POLL_SECONDS = 0.1
_LOOK_SECONDS = 1.0
# The service closes its files after the time that its jobs have to save.
_CLOSING_SECONDS = 15.0
_HOLDING = ("starting", "running", "resizing")


class Ending:
    """Waits for the end of one service. Make it before the service stops, since that removes the process number."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._home = home_layout.home(os.environ)
        self._pid = _pid_of(self._home, client.url)

    def wait(self, seconds: float, say: Callable[[str], None]) -> None:
        """Wait until the service has ended; PolluxError with a remedy if that takes `seconds` and 15 more."""
        most = seconds + _CLOSING_SECONDS
        began, looked_at = time.monotonic(), -math.inf
        left: list[str] = []
        while not self._is_gone():
            now = time.monotonic()
            if now - began > most:
                raise PolluxError(self._not_ended(most, left))
            if now - looked_at >= _LOOK_SECONDS:
                looked_at = now
                before, left = left, self._holding()
                if left and left != before:
                    say(f"waiting for {', '.join(left)} to save and stop, at most {most:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _is_gone(self) -> bool:
        if self._pid is not None:
            return not is_alive(self._pid)
        try:
            self._client.get("/healthz")
        except Unreachable:
            return True
        return False

    def _holding(self) -> list[str]:
        """Jobs that still hold GPUs; empty if the service no longer answers."""
        try:
            jobs = self._client.get("/v1/jobs", active="true", limit=1000)["jobs"]
        except (PolluxError, KeyError):
            return []
        return [str(job["id"]) for job in jobs if job["state"] in _HOLDING]

    def _not_ended(self, seconds: float, left: list[str]) -> str:
        who = f"the service at {self._client.url}" + (f" (process {self._pid})" if self._pid is not None else "")
        waits = f", waiting for {', '.join(left)}" if left else ""
        kill = f" or 'kill -9 {self._pid}': its jobs run on, and the next 'pollux up' finds them" if self._pid else ""
        log = self._home / "service.log"
        return f"{who} is still running after {seconds:.0f} s{waits}; see {log}, wait with 'pollux down' again{kill}"


def _pid_of(home: Path, url: str) -> int | None:
    """The process number of the service with this address; None unless it runs in this home."""
    try:
        found = json.loads(home_layout.service_file(home).read_text(encoding="utf-8"))
        return int(found["pid"]) if found["url"] == url else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie (ended, but not waited for) does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")
