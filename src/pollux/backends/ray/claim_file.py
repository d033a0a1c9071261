"""The file with a service's claims on Ray's GPUs and with their nodes, written soon after each change."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pollux.backends.process.records import read_record, write_record
from pollux.core.errors import BackendFailed

__all__ = ["ClaimFile"]

_log = logging.getLogger("pollux.backends")

# A crash may lose changes younger than this, which does no harm: a restart frees such claims, or makes them again.
_PAUSE_SECONDS = 0.05


class ClaimFile:
    """Writes the value of `record()` into `path` from a thread of its own, between `start` and `close`."""

    def __init__(self, path: Path, record: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._record = path, record
        self._written: Mapping[str, Any] | None = None
        self._has_changed = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._keep_written, daemon=True, name="pollux-ray-claims")

    def read(self) -> Mapping[str, Any]:
        """The record that an earlier service wrote; empty where there is none."""
        return read_record(self._path) or {}

    def start(self) -> None:
        """Write the record now, and from now on whenever it has changed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()

    def note_change(self) -> None:
        """Have the record written soon."""
        self._has_changed.set()

    def close(self) -> None:
        """Write the record for the last time."""
        self._is_closing = True
        self._has_changed.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._write()

    def _keep_written(self) -> None:
        while not self._is_closing:
            self._has_changed.wait()
            self._has_changed.clear()
            self._write()
            time.sleep(_PAUSE_SECONDS)

    def _write(self) -> None:
        record = self._record()
        if record == self._written:
            return
        try:
            write_record(self._path, record)
        except BackendFailed as error:
            _log.warning("the claims on Ray's GPUs could not be written: %s", error)
        else:
            self._written = record
