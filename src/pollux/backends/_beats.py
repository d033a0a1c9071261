"""Signs of life of a job's replicas: who has been silent for too long. Pure; what is done about it is the shim's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DEFAULT_HANG_SECONDS", "Beats"]

DEFAULT_HANG_SECONDS = 30.0
"""How long a replica that trains may be silent."""


@dataclass(slots=True)
class _Sign:
    step: int
    busy: bool
    at: float
    stepped: bool = False


@dataclass(slots=True)
class Beats:
    """The last beat of each replica, by its number. Hung is who has stepped, announced nothing and is silent.

    `false_alarms` counts beats that came after their replica had been given up.
    """

    hang_seconds: float = DEFAULT_HANG_SECONDS
    false_alarms: int = 0
    _signs: dict[int, _Sign] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)

    def heard(self, number: int, beat: Mapping[str, Any], now: float) -> None:
        """A beat that differs from the one before."""
        if number in self._given_up:
            self.false_alarms += 1
            self._given_up.discard(number)
            return
        step, before = int(beat.get("step", -1)), self._signs.get(number)
        stepped = before is not None and (before.stepped or step > before.step)
        self._signs[number] = _Sign(step, bool(beat.get("busy")), now, stepped)

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all others, and that these have stepped: a new generation has a first step of its own."""
        kept = set(numbers)
        self._signs = {number: sign for number, sign in self._signs.items() if number in kept}
        for sign in self._signs.values():
            sign.stepped = False

    def silent(self, now: float) -> list[int]:
        """Those that are hung at this time; each is named once."""
        found = [number for number in self._signs if self._due_of(number) <= now]
        for number in found:
            del self._signs[number]
            self._given_up.add(number)
        return found

    @property
    def due(self) -> float | None:
        """When the next one counts as hung, if nothing is heard."""
        at = min((self._due_of(number) for number in self._signs), default=float("inf"))
        return None if at == float("inf") else at

    def _due_of(self, number: int) -> float:
        sign = self._signs[number]
        return sign.at + self.hang_seconds if sign.stepped and not sign.busy else float("inf")
