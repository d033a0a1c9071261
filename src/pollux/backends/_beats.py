"""Signs of life of a job's replicas: who has been silent for too long. Pure; what is done about it is the shim's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DEFAULT_HANG_SECONDS", "FINISHED", "Beats"]

DEFAULT_HANG_SECONDS = 30.0
"""How long a replica that trains may be silent."""

FINISHED = "finished"
"""What a replica is busy with whose job is through, while its script still does something of its own."""

_REGROUP = "regroup"
# What is announced may take long, and is told again every second, unless something holds the whole interpreter up.
_BUSY_TIMES = 10.0


@dataclass(slots=True)
class _Sign:
    step: int
    busy: str
    at: float


@dataclass(slots=True)
class Beats:
    """The last beat of each replica, by its number. Hung is who has stepped, and is silent for `hang_seconds`.

    Who announced something long is given ten times as much; who goes to another generation, `regroup_seconds` more,
    while which it may wait for others in the store. `false_alarms` counts beats that came after their replica had been
    given up.
    """

    hang_seconds: float = DEFAULT_HANG_SECONDS
    regroup_seconds: float = 30.0
    false_alarms: int = 0
    _signs: dict[int, _Sign] = field(default_factory=dict)
    _given_up: set[int] = field(default_factory=set)

    def heard(self, number: int, beat: Mapping[str, Any], now: float) -> None:
        """A beat that differs from the one before."""
        if number in self._given_up:
            self.false_alarms += 1
            self._given_up.discard(number)
            return
        self._signs[number] = _Sign(int(beat.get("step", -1)), str(beat.get("busy") or ""), now)

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all others."""
        kept = set(numbers)
        self._signs = {number: sign for number, sign in self._signs.items() if number in kept}

    def renew(self, number: int) -> None:
        """The number is another replica's from now on."""
        self._signs.pop(number, None)
        self._given_up.discard(number)

    def settle(self, numbers: Iterable[int], now: float) -> None:
        """These are the replicas now, and each has just taken its first step among them."""
        steps = self.steps()
        self._signs = {number: _Sign(max(steps.get(number, 0), 0), "", now) for number in numbers}

    def steps(self) -> dict[int, int]:
        """The last step that each has told of."""
        return {number: sign.step for number, sign in self._signs.items()}

    def is_finished(self) -> bool:
        """Whether one says that the job is through."""
        return any(sign.busy == FINISHED for sign in self._signs.values())

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
        if sign.busy == FINISHED or (sign.step < 0 and not sign.busy):
            return float("inf")
        if sign.busy == _REGROUP:
            return sign.at + self.hang_seconds + self.regroup_seconds
        return sign.at + self.hang_seconds * (_BUSY_TIMES if sign.busy else 1.0)
