"""Who holds the folder of checkpoints, or the store behind it: replica 0 alone, also where replicas change."""

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
    """This replica's hold on the checkpoints of its job; `folder` is None while it holds nothing.

    `wanted` says that this replica is to hold it; whoever is not wanted takes hold of nothing, and lets go. After
    `close` the hold is never wanted again.
    """

    def __init__(self, path: Path, store: ObjectStore | None, holder: Holder, wanted: bool) -> None:
        self.folder: CheckpointFolder | None = None
        self._path = path
        self._store = store
        self._holder = holder
        self._wanted = wanted
        self._closed = False
        self._taking: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        """Whether this replica is to hold the checkpoints."""
        return self._wanted and not self._closed

    @wanted.setter
    def wanted(self, wanted: bool) -> None:
        self._wanted = wanted

    def open(self) -> None:
        """Take hold at once; `MisusedJob` where somebody else has it."""
        store = self._store
        self.folder = CheckpointFolder(self._path) if store is None else ObjectStoreFolder(store, self._holder)

    def take(self) -> None:
        """Take hold as soon as the replica that held it has let it go."""
        if self._taking not in (None, threading.current_thread()):
            self._taking.join()
        end = time.monotonic() + _HANDOVER_SECONDS
        while self.folder is None and self.wanted:
            try:
                self.open()
            except MisusedJob:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def take_in_background(self) -> None:
        """Take hold from another thread, since a store may take its time."""
        self._taking = threading.Thread(target=self._take_or_say, name="pollux-hold", daemon=True)
        self._taking.start()

    def _take_or_say(self) -> None:
        try:
            self.take()
        except PolluxError as error:
            # It is tried again when there is something to save.
            where = self._path if self._store is None else self._store.address
            _logger.warning("%s is not held yet: %s", where, error)
        if not self.wanted:
            # The store took its time, and this replica is not to hold it any more.
            self.let_go()

    def let_go(self) -> None:
        """Let others have it."""
        # The thread that takes hold may come to the same end at this moment.
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.release()

    def close(self) -> None:
        """Let others have it, and never take it again."""
        self._closed = True
        self.let_go()
