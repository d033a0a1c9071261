"""Which slots (GPUs, or shares of CPU cores) of one node are held. No processes here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["SlotTable"]


class SlotTable:
    """Places 0 to `count` − 1; those given out lie together where they can."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held: Counter[int] = Counter()

    @property
    def free(self) -> list[int]:
        """Places that nobody holds, in order."""
        return [place for place in range(self.count) if not self._held[place]]

    def allocate(self, number: int) -> tuple[int, ...] | None:
        """That many places, neighbours where there are some, now held; None where there are too few."""
        free = self.free
        if len(free) < number:
            return None
        runs = (free[first : first + number] for first in range(len(free) - number + 1))
        chosen = min(runs, key=lambda run: run[-1] - run[0] if run else 0)
        self._held.update(chosen)
        return tuple(chosen)

    def mark_held(self, places: Iterable[int]) -> None:
        """Note what is held already: free again once everyone who holds it has let go."""
        self._held.update(places)

    def release(self, places: Iterable[int]) -> None:
        """Free again."""
        self._held.subtract(places)
