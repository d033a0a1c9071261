"""A slot: the device of a node that one replica has. Records and messages contain its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Slot", "read_slots"]

_GONE = "gone:"
_INDEX = re.compile("[0-9]{1,6}")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Device number `index` of a node. The node is empty for a slot of this machine.

    The name of a slot is `3` on this machine and `n1/3` on node n1. A slot that is not available is marked as gone: its
    node does not exist, and its name is `gone:n1/3`.
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
        """Whether the slot is not available."""
        return self.node.startswith(_GONE)

    @property
    def real_node(self) -> str:
        """The node of the slot, also where the slot is marked as gone."""
        return self.node.removeprefix(_GONE)

    @property
    def gone(self) -> Slot:
        """The same slot, marked as gone."""
        return Slot(f"{_GONE}{self.real_node}", self.index)


def read_slots(names: Iterable[object]) -> tuple[Slot, ...]:
    """The slots of these names; names that no slot can have are left out."""
    return tuple(Slot.read(name) for name in map(str, names) if _INDEX.fullmatch(name.rpartition("/")[2]))
