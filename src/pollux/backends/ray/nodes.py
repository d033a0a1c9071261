"""Reads the rows of `ray.nodes()`. Pure; nodes that are dead or have nothing to lend are left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.core import Node

__all__ = ["RayNode", "described", "lending_nodes", "node_from"]

_TYPE = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class RayNode:
    """One living node of a Ray cluster; `memory_bytes` is 0 where Ray does not count it.

    `name`: the machine's name with a part of Ray's id, which a restart changes.
    """

    ray_id: str
    name: str
    address: str
    places: int
    gpu_type: str
    num_cpus: float
    memory_bytes: float
    preemptible: bool

    @property
    def node(self) -> Node:
        """The node that it lends."""
        memory_bytes = self.memory_bytes or math.inf
        return Node(self.name, self.places, self.gpu_type, self.num_cpus, memory_bytes, self.preemptible)


def described(node: Node) -> dict[str, Any]:
    """A node as the plain values on disk, which `node_from` reads."""
    return {
        "name": node.id,
        "places": node.num_gpus,
        "gpu_type": node.gpu_type,
        "num_cpus": node.num_cpus,
        "memory_bytes": node.memory_bytes,
        "preemptible": node.preemptible,
    }


def node_from(plain: Mapping[str, Any]) -> Node:
    """The node that `described` wrote."""
    return Node(
        id=str(plain["name"]),
        num_gpus=int(plain["places"]),
        gpu_type=str(plain["gpu_type"]),
        num_cpus=float(plain["num_cpus"]),
        memory_bytes=float(plain["memory_bytes"]),
        preemptible=bool(plain["preemptible"]),
    )


def lending_nodes(rows: Iterable[Mapping[str, Any]], slots: int | None, with_gpus: bool) -> list[RayNode]:
    """The nodes that can lend places, in the order of their names.

    `slots`: how many CPU slots each lends instead of its GPUs, at most as many as Ray has CPUs there. `with_gpus`
    False: the GPUs are not real, and nodes are of type `cpu` unless Ray names a type.
    """
    found = [_seen(row, slots, with_gpus) for row in rows if row.get("Alive")]
    return sorted((node for node in found if node.places > 0), key=lambda node: node.name)


def _seen(row: Mapping[str, Any], slots: int | None, with_gpus: bool) -> RayNode:
    resources: Mapping[str, float] = row.get("Resources") or {}
    labels: Mapping[str, str] = row.get("Labels") or {}
    cpus = float(resources.get("CPU", 0.0))
    host = re.sub(r"[^A-Za-z0-9-]+", "-", str(row.get("NodeManagerHostname", ""))).strip("-")[:48] or "node"
    return RayNode(
        ray_id=str(row["NodeID"]),
        name=f"{host}-{str(row['NodeID'])[-6:]}",
        address=str(row["NodeManagerAddress"]),
        places=int(resources.get("GPU", 0.0)) if slots is None else min(slots, math.floor(cpus)),
        gpu_type="cpu" if slots is not None else _gpu_type(resources) or ("gpu" if with_gpus else "cpu"),
        num_cpus=cpus,
        memory_bytes=float(resources.get("memory", 0.0)),
        preemptible=labels.get("ray.io/market-type") == "spot",
    )


def _gpu_type(resources: Mapping[str, float]) -> str:
    """The GPU types that Ray names among a node's resources; empty for none."""
    return " and ".join(sorted(name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)))
