"""How long one optimiser step takes: the protocol, the law of overlap, and the published seven parameters.

Other implementations are in `fabric` and `corrected`; fits to measurements are in `fit`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pollux.core.errors import InvalidInput

__all__ = [
    "MAX_OVERLAP",
    "AffineThroughput",
    "Array",
    "FloatArray",
    "PublishedThroughput",
    "Quantity",
    "SyncBasis",
    "ThroughputModel",
    "overlapped_seconds",
    "published_sync_basis",
]

Array: TypeAlias = npt.NDArray[Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Quantity = TypeVar("Quantity", float, Array)

SyncBasis: TypeAlias = Callable[[Array, Array], FloatArray]
"""`basis(num_nodes[S], num_gpus[S]) -> [4, S]`: T_sync of a placement is the basis times the four parameters
(constant across nodes, growth across nodes, constant within a node, growth within a node)."""

MAX_OVERLAP = 10.0


class ThroughputModel(Protocol):
    """Seconds of one optimiser step (§3.2). Arguments are all numbers, or arrays that broadcast.

    The search for the best batch relies on T_grad being affine in the local batch, Eq. (G2).
    """

    @property
    def overlap(self) -> float:
        """γ ≥ 1 of Eq. (G6): 1 if synchronisation does not overlap computation, larger the more it does."""
        ...

    def compute_seconds(self, local_batch: Quantity) -> Quantity:
        """T_grad(m) = αc + βc·m, Eq. (G2), seconds of forward and backward pass over one local batch."""
        ...

    def sync_seconds(self, num_nodes: Quantity, num_gpus: Quantity) -> Quantity:
        """T_sync(N, K), seconds to average the gradients of K GPUs on N nodes; 0 for one GPU."""
        ...

    def step_seconds(
        self, num_nodes: Quantity, num_gpus: Quantity, local_batch: Quantity, accumulation: Quantity | int = 0
    ) -> Quantity:
        """T_iter = s·T_grad + (T_grad^γ + T_sync^γ)^(1/γ), Eq. (G6), seconds of a whole optimiser step."""
        ...


def overlapped_seconds(compute: Quantity, sync: Quantity, overlap: float) -> Quantity:
    """(T_grad^γ + T_sync^γ)^(1/γ) of Eq. (G6), as max·(1 + (min/max)^γ)^(1/γ), which cannot over- or underflow."""
    if isinstance(compute, np.ndarray) or isinstance(sync, np.ndarray):
        longer = np.maximum(compute, sync)
        ratio = np.minimum(compute, sync) / longer
        result: Quantity = longer * (1.0 + ratio**overlap) ** (1.0 / overlap)
        return result
    if compute < sync:
        compute, sync = sync, compute
    if sync == 0.0:
        return compute
    return float(compute * (1.0 + (sync / compute) ** overlap) ** (1.0 / overlap))


class AffineThroughput(ABC):
    """What all models with an affine T_grad and the law of overlap share; a subclass adds T_sync."""

    __slots__ = ()
    alpha_c: float
    beta_c: float
    gamma: float

    @property
    def overlap(self) -> float:
        """γ of the law of overlap, Eq. (G6)."""
        return self.gamma

    def compute_seconds(self, local_batch: Quantity) -> Quantity:
        """T_grad(m) = αc + βc·m, Eq. (G2)."""
        result: Quantity = self.alpha_c + self.beta_c * local_batch
        return result

    @abstractmethod
    def sync_seconds(self, num_nodes: Quantity, num_gpus: Quantity) -> Quantity:
        """T_sync(N, K)."""

    def step_seconds(
        self, num_nodes: Quantity, num_gpus: Quantity, local_batch: Quantity, accumulation: Quantity | int = 0
    ) -> Quantity:
        """T_iter = s·T_grad + (T_grad^γ + T_sync^γ)^(1/γ), Eq. (G6)."""
        compute = self.compute_seconds(local_batch)
        sync = self.sync_seconds(num_nodes, num_gpus)
        result: Quantity = accumulation * compute + overlapped_seconds(compute, sync, self.gamma)
        return result

    def _check(self, parameters: tuple[tuple[str, float], ...]) -> None:
        for name, value in parameters:
            if not (math.isfinite(value) and value >= 0.0):
                raise InvalidInput(f"{name} is {value}: give a finite number of seconds, 0 or more")
        if self.alpha_c + self.beta_c <= 0.0:
            raise InvalidInput("alpha_c and beta_c are both 0: a local batch must take some time")
        if not 1.0 <= self.gamma <= MAX_OVERLAP:
            raise InvalidInput(f"gamma is {self.gamma}: give a value from 1 to {MAX_OVERLAP:g}")


def published_sync_basis(num_nodes: Array, num_gpus: Array) -> FloatArray:
    """The columns of T_sync, Eq. (G3), in (αn, βn, αr, βr) for placements N[S], K[S]; shape [4, S]."""
    several = num_gpus > 1
    across = num_nodes > 1
    basis = np.empty((4, *num_gpus.shape))
    basis[0] = several & across
    basis[2] = several & ~across
    beyond = np.maximum(num_gpus - 2.0, 0.0)
    basis[1] = basis[0] * beyond
    basis[3] = basis[2] * beyond
    return basis


@dataclass(frozen=True, slots=True)
class PublishedThroughput(AffineThroughput):
    """The paper's seven parameters (§3.2), all in seconds but γ.

    T_sync = 0 for K = 1; αr + βr·max(K−2, 0) on one node; αn + βn·max(K−2, 0) across nodes: Eq. (G3).
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def __post_init__(self) -> None:
        self._check(
            (
                ("alpha_c", self.alpha_c),
                ("beta_c", self.beta_c),
                ("alpha_n", self.alpha_n),
                ("beta_n", self.beta_n),
                ("alpha_r", self.alpha_r),
                ("beta_r", self.beta_r),
            )
        )

    @property
    def parameters(self) -> tuple[float, float, float, float, float, float, float]:
        """(αc, βc, αn, βn, αr, βr, γ), the order that fits and tables use."""
        return (
            self.alpha_c,
            self.beta_c,
            self.alpha_n,
            self.beta_n,
            self.alpha_r,
            self.beta_r,
            self.gamma,
        )

    @property
    def sync_basis(self) -> SyncBasis:
        """T_sync is this basis times (αn, βn, αr, βr)."""
        return published_sync_basis

    def sync_seconds(self, num_nodes: Quantity, num_gpus: Quantity) -> Quantity:
        """T_sync(N, K), Eq. (G3): affine in K from two GPUs on, with parameters of its own across nodes."""
        if isinstance(num_nodes, np.ndarray) or isinstance(num_gpus, np.ndarray):
            across = np.asarray(num_nodes) > 1
            beyond = np.maximum(num_gpus - 2.0, 0.0)
            seconds = np.where(across, self.alpha_n + self.beta_n * beyond, self.alpha_r + self.beta_r * beyond)
            result: Quantity = np.where(np.asarray(num_gpus) > 1, seconds, 0.0)
            return result
        if num_gpus <= 1:
            return 0.0
        beyond_two = num_gpus - 2.0
        if num_nodes > 1:
            return float(self.alpha_n + self.beta_n * beyond_two)
        return float(self.alpha_r + self.beta_r * beyond_two)
