"""When decisions are made: in rounds, or after events that can change them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pollux.controller.machine.settings import ControllerSettings
from pollux.controller.messages.commands import Command, Decide

__all__ = ["DecisionTimes"]


class DecisionTimes:
    """When the last decision was made, when the next is due, and the revision of the last event that needs one."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self.next_at: float | None = None
        self._last = -math.inf
        self._last_change = 0

    @property
    def last_at(self) -> float | None:
        """When the last decision was made; None before the first."""
        return None if math.isinf(self._last) else self._last

    def start(self, at: float) -> list[Command]:
        """Start the clock of rounds; under `events` there is nothing to do until something happens."""
        if self._settings.trigger == "rounds":
            return self.schedule(at + self._settings.interval_seconds)
        return []

    def note_change(self, at: float, revision: int) -> list[Command]:
        """Note an event that can change the decision: under `events`, a decision is due."""
        if self._settings.trigger != "events":
            return []
        self._last_change = revision
        due = max(at, self._last + self._settings.min_gap_seconds)
        return self.schedule(due) if self.next_at is None or self.next_at > due else []

    def note_decision(self, at: float) -> None:
        """Note that a decision was made, so that none is due."""
        self._last, self.next_at = at, None

    def schedule_next(self, at: float, revision: int) -> list[Command]:
        """After a decision on the snapshot of `revision`, schedule the next round, or a decision on later events."""
        if self._settings.trigger == "rounds":
            return self.schedule(at + self._settings.interval_seconds)
        if self._last_change > revision:
            return self.schedule(at + self._settings.min_gap_seconds)
        return []

    def schedule(self, at: float) -> list[Command]:
        """Ask for a decision at that time."""
        self.next_at = at
        return [Decide(at)]

    def skip(self, seconds: float) -> None:
        """Move all times later by the seconds that the clock skipped."""
        self._last += seconds
        if self.next_at is not None:
            self.next_at += seconds

    def state(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {"last_decision": self.last_at, "next_decision": self.next_at, "last_change": self._last_change}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `state()` returned."""
        self._last = -math.inf if saved["last_decision"] is None else saved["last_decision"]
        self.next_at, self._last_change = saved["next_decision"], saved["last_change"]
