"""Which slots (GPUs, or shares of CPU cores) of one node are held. No processes here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

__all__ = ["SlotTable"]


class SlotTable:
    """Places 0 to `count` − 1; a job gets neighbouring places where possible."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held: Counter[int] = Counter()

    @property
    def free(self) -> list[int]:
        """Places that no job holds, in order."""
        return [place for place in range(self.count) if not self._held[place]]

    def allocate(self, number: int, avoided: Collection[int] = ()) -> tuple[int, ...] | None:
        """Hold and return that many places, neighbours where possible; None where too few are free.

        Those to be `avoided` are taken only where the others are too few.
        """
        free = [place for place in self.free if place not in avoided]
        free = free if len(free) >= number else self.free
        if len(free) < number:
            return None
        runs = (free[first : first + number] for first in range(len(free) - number + 1))
        chosen = min(runs, key=lambda run: run[-1] - run[0] if run else 0)
        self._held.update(chosen)
        return tuple(chosen)

    def mark_held(self, places: Iterable[int]) -> None:
        """Note that a job holds these places; a place is free once each of its holders has released it."""
        self._held.update(places)

    def release(self, places: Iterable[int]) -> None:
        """Free these places."""
        self._held.subtract(places)
