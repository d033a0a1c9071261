"""A second throughput model, for fabrics where synchronising does not grow linearly with the number of GPUs.

It counts what an all-reduce does: messages, which cost latency, and bytes, which cost transfer time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pollux.core.errors import UnknownName
from pollux.goodput.throughput import AffineThroughput, Array, FloatArray, Quantity, SyncBasis

__all__ = ["AllReduce", "FabricThroughput", "ring_sync_basis", "tree_sync_basis"]

AllReduce = Literal["ring", "tree"]


def _ring_rounds(members: Array) -> Array:
    """2(p−1) messages pass through each member of a ring of p."""
    return 2.0 * (members - 1.0)


def _ring_volume(members: Array) -> Array:
    """Each member sends 2(p−1)/p of the gradient."""
    return 2.0 * (members - 1.0) / members


def _tree_rounds(members: Array) -> Array:
    """2·ceil(log2 p): up to the root and down again; the slack keeps powers of two exact."""
    return 2.0 * np.ceil(np.log2(members) - 1e-9)


def _tree_volume(members: Array) -> Array:
    """The whole gradient goes up once and down once."""
    return np.where(members > 1.0, 2.0, 0.0)


def _basis(
    num_nodes: Array, num_gpus: Array, rounds: Callable[[Array], Array], volume: Callable[[Array], Array]
) -> FloatArray:
    nodes = np.maximum(num_nodes, 1.0)
    members = np.maximum(num_gpus / nodes, 1.0)
    return np.stack([volume(nodes), rounds(nodes), volume(members), rounds(members)])


def ring_sync_basis(num_nodes: Array, num_gpus: Array) -> FloatArray:
    """What rings within nodes and one across them cost, for N[S], K[S]; shape [4, S]."""
    return _basis(num_nodes, num_gpus, _ring_rounds, _ring_volume)


def tree_sync_basis(num_nodes: Array, num_gpus: Array) -> FloatArray:
    """What trees within nodes and one across them cost, for N[S], K[S]; shape [4, S]."""
    return _basis(num_nodes, num_gpus, _tree_rounds, _tree_volume)


_BASES: dict[str, SyncBasis] = {"ring": ring_sync_basis, "tree": tree_sync_basis}


@dataclass(frozen=True, slots=True)
class FabricThroughput(AffineThroughput):
    """Hierarchical all-reduce: within each node over K/N GPUs, then across the N nodes; in seconds but γ.

    T_sync(p) = rounds(p)·latency + volume(p)·transfer for each of the two levels, added up. Ring: rounds 2(p−1),
    volume 2(p−1)/p. Tree: rounds 2·ceil(log2 p), volume 2. `transfer` is the time the whole gradient takes over
    one link (bytes over bandwidth). Compute and overlap are as published.
    """

    alpha_c: float
    beta_c: float
    node_transfer: float
    node_latency: float
    local_transfer: float
    local_latency: float
    gamma: float
    algorithm: AllReduce = "ring"

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
        """T_sync(N, K) = across(N) + within(K/N)."""
        nodes, gpus = np.broadcast_arrays(np.asarray(num_nodes, float), np.asarray(num_gpus, float))
        parameters = np.array(self.parameters[2:6])
        seconds = np.tensordot(parameters, self.sync_basis(nodes, gpus), axes=1)
        if isinstance(num_nodes, np.ndarray) or isinstance(num_gpus, np.ndarray):
            result: Quantity = seconds
            return result
        return float(seconds)
