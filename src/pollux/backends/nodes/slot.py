"""The place of one replica: a device of a node. Records and messages hold its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Slot", "read_slots"]

_GONE = "gone:"


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Device number `index` of a node; the node of a slot of this machine has no name.

    Its name is `3` on this machine and `n1/3` elsewhere. A slot that must not be used, or cannot be had, is `gone`: it
    is on no node that there is, and its name is `gone:n1/3`.
    """

    node: str
    index: int

    def __str__(self) -> str:
        return f"{self.node}/{self.index}" if self.node else str(self.index)

    @classmethod
    def read(cls, name: str) -> Slot:
        """The slot of that name; ValueError where it is no slot's name."""
        node, _, index = name.rpartition("/")
        return cls(node, int(index))

    @property
    def is_gone(self) -> bool:
        """Whether it must not be used, or cannot be had."""
        return self.node.startswith(_GONE)

    @property
    def real_node(self) -> str:
        """The node that it is on, or would be on if it were not gone."""
        return self.node.removeprefix(_GONE)

    @property
    def gone(self) -> Slot:
        """The same slot as one that must not be used."""
        return Slot(f"{_GONE}{self.real_node}", self.index)


def read_slots(names: Iterable[object]) -> tuple[Slot, ...]:
    """The slots of these names, without what is no slot's name."""
    return tuple(Slot.read(name) for name in map(str, names) if name.rpartition("/")[2].isdigit())
