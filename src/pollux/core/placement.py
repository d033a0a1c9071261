"""Where one job's GPUs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pollux.core.errors import InvalidInput

__all__ = ["NOWHERE", "Allocation", "Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs by node, in the order in which replicas are numbered.

    Two placements are equal when their ordered shares are: the published simulation compares ordered lists
    of nodes, and step times depend on the order where nodes hold different counts. A `shared` placement holds half of
    each of its GPUs: another shared one may have the other halves.
    """

    shares: tuple[tuple[str, int], ...] = ()
    shared: bool = False
    num_gpus: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        total = 0
        for node, count in self.shares:
            if count < 1:
                raise InvalidInput(f"placement holds {count} GPUs on '{node}'; leave out nodes that hold none")
            total += count
        if len(self.shares) > 1 and len({node for node, _ in self.shares}) != len(self.shares):
            raise InvalidInput(f"placement {self.shares} names a node twice; add its GPUs up")
        if self.shared and not self.shares:
            raise InvalidInput("placement holds nothing and is shared; leave shared out")
        object.__setattr__(self, "num_gpus", total)

    @classmethod
    def of(cls, gpus_by_node: Mapping[str, int]) -> Placement:
        """A placement of these counts, in the mapping's order, zeros left out."""
        return cls(tuple((node, count) for node, count in gpus_by_node.items() if count))

    @property
    def num_nodes(self) -> int:
        """Nodes it spans."""
        return len(self.shares)

    @property
    def counts(self) -> tuple[int, ...]:
        """GPUs per node, in order."""
        return tuple(count for _, count in self.shares)

    @property
    def is_distributed(self) -> bool:
        """Whether it spans several nodes, and so uses the network."""
        return len(self.shares) > 1

    def on(self, node_id: str) -> int:
        """GPUs held on one node."""
        return next((count for node, count in self.shares if node == node_id), 0)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.shares)

    def __bool__(self) -> bool:
        return bool(self.shares)

    def __str__(self) -> str:
        sign = "/2" if self.shared else ""
        return " ".join(f"{node}:{count}{sign}" for node, count in self.shares) or "nowhere"


NOWHERE = Placement()
"""The placement of a job that holds nothing."""

Allocation = Mapping[str, Placement]
"""All placements: job id to placement; jobs that hold nothing may be left out."""
