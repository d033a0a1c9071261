"""Nodes, clusters, and the queues that share them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pollux.core.errors import InvalidInput

__all__ = ["Cluster", "Node", "Queue"]


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    `num_cpus` and `memory_bytes` are infinite if they are not counted. `isolated_network`: the network isolates the
    traffic of different jobs, so that several distributed jobs may share the node. A node that is not `schedulable`
    keeps its jobs and gets no new ones.
    """

    id: str
    num_gpus: int
    gpu_type: str = ""
    num_cpus: float = math.inf
    memory_bytes: float = math.inf
    preemptible: bool = False
    isolated_network: bool = False
    schedulable: bool = True

    def __post_init__(self) -> None:
        if self.num_gpus < 0:
            raise InvalidInput(f"node '{self.id}': num_gpus is {self.num_gpus}; give 0 or more")
        for name in ("num_cpus", "memory_bytes"):
            value = getattr(self, name)
            if math.isnan(value) or value < 0:
                raise InvalidInput(f"node '{self.id}': {name} is {value}; give 0 or more")


@dataclass(frozen=True, slots=True)
class Queue:
    """A share of the cluster: `weight` multiplies its jobs' priority, `gpu_quota` caps what they hold together."""

    name: str
    weight: float = 1.0
    gpu_quota: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidInput(f"queue '{self.name}': weight is {self.weight}; give a finite number above 0")
        if self.gpu_quota is not None and self.gpu_quota < 0:
            raise InvalidInput(f"queue '{self.name}': gpu_quota is {self.gpu_quota}; give 0 or more, or leave it out")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes in a fixed order; the order breaks ties in every policy."""

    nodes: tuple[Node, ...]
    by_id: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    num_gpus: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {node.id: node for node in self.nodes}
        if len(by_id) != len(self.nodes):
            seen: set[str] = set()
            twice = next(node.id for node in self.nodes if node.id in seen or seen.add(node.id))  # type: ignore[func-returns-value]
            raise InvalidInput(f"node id '{twice}' appears twice; every node needs its own")
        object.__setattr__(self, "by_id", by_id)
        object.__setattr__(self, "num_gpus", sum(node.num_gpus for node in self.nodes))

    @classmethod
    def uniform(cls, num_nodes: int, gpus_per_node: int, **node: object) -> Cluster:
        """`num_nodes` equal nodes called node-0, node-1, ..."""
        if num_nodes < 1 or gpus_per_node < 1:
            raise InvalidInput(
                f"a cluster of {num_nodes} nodes x {gpus_per_node} GPUs can run nothing; give at least 1 of each"
            )
        return cls(tuple(Node(f"node-{i}", gpus_per_node, **node) for i in range(num_nodes)))  # type: ignore[arg-type]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Cluster:
        """A cluster of these nodes, in this order."""
        return cls(tuple(nodes))
