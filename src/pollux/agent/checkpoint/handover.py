"""The hold on a folder of checkpoints, or on the store behind it; only the present replica 0 has it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from pollux.agent.checkpoint.folder import CheckpointFolder
from pollux.agent.checkpoint.lease import Holder
from pollux.agent.checkpoint.object_store import ObjectStoreFolder
from pollux.core.errors import MisusedJob, PolluxError
from pollux.storage.object_store import ObjectStore

__all__ = ["FolderHold"]

_logger = logging.getLogger("pollux")
_HANDOVER_SECONDS = 30.0


class FolderHold:
    """This replica's hold on the checkpoints of its job; `folder` is None while it has none.

    `wanted`: whether this replica should hold the checkpoints; it acquires them only then. It is false after `close`.
    """

    def __init__(self, path: Path, store: ObjectStore | None, holder: Holder, wanted: bool) -> None:
        self.folder: CheckpointFolder | None = None
        self._path = path
        self._store = store
        self._holder = holder
        self._wanted = wanted
        self._closed = False
        self._acquiring: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        """Whether this replica is to hold the checkpoints."""
        return self._wanted and not self._closed

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        self._wanted = wanted

    def open(self) -> None:
        """Acquire the hold at once; `MisusedJob` where another process has it."""
        store = self._store
        self.folder = CheckpointFolder(self._path) if store is None else ObjectStoreFolder(store, self._holder)

    def acquire(self) -> None:
        """Acquire the hold as soon as another replica has released it; `MisusedJob` where that takes too long."""
        if self._acquiring not in (None, threading.current_thread()):
            self._acquiring.join()
        end = time.monotonic() + _HANDOVER_SECONDS
        while self.folder is None and self.wanted:
            try:
                self.open()
            except MisusedJob:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def acquire_in_background(self) -> None:
        """Acquire the hold in another thread, since a store may be slow."""
        self._acquiring = threading.Thread(target=self._acquire_or_warn, name="pollux-hold", daemon=True)
        self._acquiring.start()

    def _acquire_or_warn(self) -> None:
        try:
            self.acquire()
        except PolluxError as error:
            # The next save tries again.
            where = self._path if self._store is None else self._store.address
            _logger.warning("%s is not held yet: %s", where, error)
        if not self.wanted:
            # The store was slow, and meanwhile another replica has become replica 0.
            self.release()

    def release(self) -> None:
        """Release the hold, so that another process can have it."""
        # The thread that acquires the hold may release it at the same moment.
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.release()

    def close(self) -> None:
        """Release the hold, and never acquire it again."""
        self._closed = True
        self.release()
