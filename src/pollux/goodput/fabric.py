"""A second throughput model, for fabrics where synchronising does not grow linearly with the number of GPUs.

It counts what an all-reduce does: rounds of messages, which cost latency, and bytes, which cost transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pollux.core.errors import UnknownName
from pollux.goodput.throughput import AffineThroughput, Array, FloatArray, Quantity, SyncBasis

__all__ = ["AllReduce", "FabricThroughput", "ring_sync_basis", "tree_sync_basis"]

AllReduce = Literal["ring", "tree"]


def ring_sync_basis(num_nodes: Array, num_gpus: Array) -> FloatArray:
    """Volume and rounds of one ring through all GPUs, Eq. (G4), for N[S], K[S]; shape [4, S]."""
    gpus = np.maximum(num_gpus, 1.0)
    rounds = 2.0 * (gpus - 1.0)
    across = np.asarray(num_nodes) > 1
    basis = np.empty((4, *gpus.shape))
    basis[1] = rounds * across
    basis[3] = rounds * ~across
    np.divide(basis[1], gpus, out=basis[0])
    np.divide(basis[3], gpus, out=basis[2])
    return basis


def tree_sync_basis(num_nodes: Array, num_gpus: Array) -> FloatArray:
    """Volume and rounds of a tree over the nodes and a ring within each, Eq. (G5), for N[S], K[S]; shape [4, S]."""
    nodes = np.maximum(num_nodes, 1.0)
    members = np.maximum(num_gpus / nodes, 1.0)
    basis = np.empty((4, *members.shape))
    basis[0] = 2.0 * (nodes > 1.0)
    basis[1] = 2.0 * np.log2(nodes)
    basis[3] = 2.0 * (members - 1.0)
    np.divide(basis[3], members, out=basis[2])
    return basis


_BASES: dict[str, SyncBasis] = {"ring": ring_sync_basis, "tree": tree_sync_basis}


@dataclass(frozen=True, slots=True)
class FabricThroughput(AffineThroughput):
    """T_sync = rounds·latency + volume·transfer, in seconds; computing and overlap are as published.

    Eq. (G4) for the ring, Eq. (G5) for the tree.

    `transfer` is the time the whole gradient takes over one link (bytes over bandwidth), `latency` that of
    one message. A ring of p GPUs makes 2(p−1) rounds and moves a volume of 2(p−1)/p; it runs at the pace of
    its slowest link, so across nodes only the node link counts. A tree of N nodes makes 2·log2(N) rounds and
    moves 2; within each node a ring of K/N GPUs comes on top.
    """

    alpha_c: float
    beta_c: float
    node_transfer: float
    node_latency: float
    local_transfer: float
    local_latency: float
    gamma: float
    algorithm: AllReduce = field(default="ring", kw_only=True)

    def __post_init__(self) -> None:
        if self.algorithm not in _BASES:
            raise UnknownName("all-reduce algorithm", str(self.algorithm), _BASES)
        self._check(
            (
                ("alpha_c", self.alpha_c),
                ("beta_c", self.beta_c),
                ("node_transfer", self.node_transfer),
                ("node_latency", self.node_latency),
                ("local_transfer", self.local_transfer),
                ("local_latency", self.local_latency),
            )
        )

    @property
    def parameters(self) -> tuple[float, float, float, float, float, float, float]:
        """In the order that fits and tables use: compute, then across nodes, then within, then γ."""
        return (
            self.alpha_c,
            self.beta_c,
            self.node_transfer,
            self.node_latency,
            self.local_transfer,
            self.local_latency,
            self.gamma,
        )

    @property
    def sync_basis(self) -> SyncBasis:
        """T_sync is this basis times (node_transfer, node_latency, local_transfer, local_latency)."""
        return _BASES[self.algorithm]

    def sync_seconds(self, num_nodes: Quantity, num_gpus: Quantity) -> Quantity:
        """T_sync(N, K) of the all-reduce, Eq. (G4) or Eq. (G5); 0 for one GPU."""
        if isinstance(num_nodes, np.ndarray) or isinstance(num_gpus, np.ndarray):
            nodes, gpus = np.broadcast_arrays(np.asarray(num_nodes, float), np.asarray(num_gpus, float))
            result: Quantity = np.tensordot(np.array(self.parameters[2:6]), self.sync_basis(nodes, gpus), axes=1)
            return result
        members = num_gpus
        seconds = 0.0
        transfer, latency = self.local_transfer, self.local_latency
        if num_nodes > 1 and self.algorithm == "ring":
            transfer, latency = self.node_transfer, self.node_latency
        elif num_nodes > 1:
            members = num_gpus / num_nodes
            seconds = 2.0 * (self.node_transfer + math.log2(num_nodes) * self.node_latency)
        rounds = 2.0 * max(members - 1.0, 0.0)
        return float(seconds + rounds * latency + rounds / max(members, 1.0) * transfer)
