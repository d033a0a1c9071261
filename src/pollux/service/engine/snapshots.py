"""Restores the controller from snapshot and log at a start, and writes snapshots, so that starts are quick."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from pollux.controller import Controller, ControllerSettings, Event
from pollux.core import Cluster
from pollux.core.errors import PolluxError
from pollux.service.settings import ServiceSettings
from pollux.store.protocol import SavedState, Store

__all__ = ["Snapshots"]

_log = logging.getLogger("pollux.service")

# The pause after a snapshot that could not be written.
_RETRY_SECONDS = 30.0


class Snapshots:
    """Reads and writes the controller's state. `clock` is the service's, and may go on while others write."""

    def __init__(self, store: Store, settings: ServiceSettings, clock: Callable[[], float]) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._revision = 0
        self._saved_at = clock()
        self._not_before = -math.inf

    def load(self, now: Callable[[], float], replay: Callable[[int, Event], None] | None = None) -> Controller:
        """The controller as the log has it: the newest snapshot and what came after.

        `replay` is called with each event of the whole log, also with those that the snapshot holds.
        """
        settings = ControllerSettings(
            trigger=self._settings.trigger,
            interval_seconds=self._settings.interval_seconds,
            min_gap_seconds=self._settings.min_gap_seconds,
            seed=self._settings.seed,
        )
        saved = self._store.load()
        if saved is None:
            controller = Controller(Cluster(()), settings)
            controller.start(self._rounds_began_at(now))
        else:
            controller = Controller.restored(saved.state, settings)
            self._revision = saved.revision
        for revision, event in self._store.read(0 if replay or saved is None else saved.revision):
            if saved is None or revision > saved.revision:
                controller.apply(event)
            if replay is not None:
                replay(revision, event)
        if controller.next_decision_at is None:
            controller.start(now())  # rounds that were not running before, such as after a change of trigger
        return controller

    def _rounds_began_at(self, now: Callable[[], float]) -> float:
        """When the clock of rounds was started; a setting, so that a restart does not shift the rounds."""
        known = self._store.setting("began_at")
        try:
            if known is not None and math.isfinite(at := float(known)):
                return at
        except ValueError:
            _log.warning("when rounds began cannot be read from the store: they begin now")
        at = now()
        self._store.set_setting("began_at", repr(at))
        return at

    @property
    def is_due(self) -> bool:
        """Whether a snapshot is due: many facts are new, or some are new and the last snapshot is old."""
        now = self._clock()
        if now < self._not_before:
            return False
        behind = self._store.revision - self._revision
        is_old = now - self._saved_at >= self._settings.snapshot_every_seconds
        return behind >= self._settings.snapshot_every_facts or (behind > 0 and is_old)

    @property
    def is_behind(self) -> bool:
        """Whether there are facts after the newest snapshot."""
        return self._store.revision != self._revision

    def writing(self, controller: Controller, keep_after: float) -> Callable[[], None]:
        """A function that writes a snapshot of this moment and drops facts up to `keep_after`, in any thread."""
        revision, state = self._store.revision, controller.state_later()

        def write() -> None:
            try:
                self._store.save(SavedState(revision, state()))
                self._saved_at, self._revision = self._clock(), revision
                self._store.trim(keep_after)
            except PolluxError as error:
                self._not_before = self._clock() + _RETRY_SECONDS
                _log.warning("no snapshot of the state could be kept: %s", error)

        return write
