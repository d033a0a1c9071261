"""Detects jumps of the machine's clock. A jump that lasts is left out of all measured times."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from pollux.backends.process.proc import boot_id
from pollux.core.errors import PolluxError
from pollux.service.settings.clock import FOLLOWED_SECONDS, SystemClock
from pollux.store.protocol import Store

__all__ = ["CONFIRMED_SECONDS", "ClockWatch"]

_log = logging.getLogger("pollux.service")

CONFIRMED_SECONDS = 600.0
"""A jump forward counts once the machine's clock has run on from there for this time."""

# A longer absence becomes a fact.
_AWAY_SECONDS = 86400.0
_SETTING = "clock"
# The clock may differ from the stored one by this much.
_CLOSE_SECONDS = 1.0

Skip = Callable[[float, bool], bool]
"""Records seconds that did not pass for jobs (and whether the service was away); returns whether it did."""


class ClockWatch:
    """Compares the service's clock with the machine's. Called by the engine's thread.

    The clock's state is stored with the id of the machine's boot, so that a jump between two services in one boot is
    noticed as well. After a new boot there is nothing to compare with.
    """

    def __init__(self, clock: SystemClock, store: Store) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot_id()
        self._kept: float | None = None
        self._jumped_to: float | None = None
        self._since = 0.0
        try:
            known, ahead = json.loads(store.setting(_SETTING) or "[]") or ("", 0.0)
        except (ValueError, TypeError):
            known, ahead = "", 0.0
        if self._boot and known == self._boot:
            self._kept = float(ahead)
            clock.resume(self._kept)

    def begin(self, newest_at: float, skip: Skip) -> None:
        """Begin: `newest_at` is when the newest fact happened, 0 if there is none."""
        self.keep()
        away = self._clock.now() - newest_at
        if newest_at > 0.0 and away > _AWAY_SECONDS:
            skip(away, True)

    def look(self, skip: Skip) -> None:
        """Look for a jump; set the clock forward by one that has lasted."""
        late, uptime = self._clock.late(), self._clock.uptime()
        if late <= FOLLOWED_SECONDS:
            if self._jumped_to is not None:
                _log.warning("the machine's clock is back; the service has not followed it")
            self._jumped_to = None
            if self._kept is None or abs(self._clock.ahead - self._kept) > _CLOSE_SECONDS:
                self.keep()
            return
        jumped_to = self._clock.ahead + late
        if self._jumped_to is None or abs(jumped_to - self._jumped_to) > FOLLOWED_SECONDS:
            self._jumped_to, self._since = jumped_to, uptime
            _log.warning(
                "the machine's clock went forward by %.0f s while %s; the service follows it once it has stayed there "
                "for %.0f s, and no job's time is counted by it",
                late, "its uptime did not", CONFIRMED_SECONDS,
            )  # fmt: skip
        elif uptime - self._since >= CONFIRMED_SECONDS and skip(late, False):
            self._clock.skip(late)
            self._jumped_to = None
            self.keep()
            _log.warning("the service's clock went forward by %.0f s, as the machine's did", late)

    def keep(self) -> None:
        """Store the clock's state for the next service."""
        self._kept = self._clock.ahead
        try:
            self._store.set_setting(_SETTING, json.dumps([self._boot, self._kept]))
        except PolluxError as error:
            _log.warning("what the clock shows could not be kept: %s", error)
