"""What a framework supplies to adaptation: times of steps, gradient noise, losses, and exchange between replicas.

PyTorch's implementations are in `step` and `distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

__all__ = ["GroupedOptimizer", "NoiseMeter", "NoiseRows", "ReplicaExchange", "StepSource", "StepTime", "StepTimer"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's times in seconds: the whole step, the host's wait for data, and the forward and backward pass of one
    micro-step (`compute_seconds`); None where that was not timed."""

    step_seconds: float
    data_seconds: float
    compute_seconds: float | None
    repeats: int
    local_batch: int
    measured: bool


class NoiseRows(Protocol):
    """Squared gradient lengths of measured steps, a row for each step and a column for each parameter group.

    `parts` and `counts` are this replica's shares, to be summed over replicas; `whole` and `totals` are equal on all of
    them. See `noise_scale.estimates`.
    """

    @property
    def parts(self) -> ArrayLike:
        """L of each step, this replica's share."""

    @property
    def whole(self) -> ArrayLike:
        """T of each step."""

    @property
    def counts(self) -> ArrayLike:
        """How many parts of each step had samples on this replica."""

    @property
    def totals(self) -> ArrayLike:
        """The samples of each step, over all replicas."""


class NoiseMeter(Protocol):
    """Measures squared gradient lengths in the norm of the optimiser's preconditioner."""

    @property
    def num_groups(self) -> int:
        """The parameter groups of the rows."""

    @property
    def kind(self) -> str:
        """The kind of preconditioner: "plain", "adam" and so on; "cold" before the first step of a kind with state."""

    @property
    def is_warm(self) -> bool:
        """Whether the preconditioner has seen enough steps to measure by it."""

    def collect(self) -> NoiseRows:
        """The rows since the last call, without waiting for a device."""


class StepTimer(Protocol):
    """Times steps."""

    @property
    def includes_data_wait(self) -> bool:
        """Whether compute times contain the wait for data, as on a device that runs behind the host."""

    def begin_step(self, told_apart: bool) -> None:
        """Start to time a step; `told_apart`: time its computation separately."""

    def add_data_wait(self, seconds: float) -> None:
        """Add a wait of the host for data."""

    def end_step(self, repeats: int, local_batch: int, measured: bool) -> None:
        """End the step: the optimiser has stepped."""

    def drain(self) -> list[StepTime]:
        """The steps that ended since the last call."""


class GroupedOptimizer(Protocol):
    """An optimiser with parameter groups: mappings with a learning rate `lr` and other options."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The groups."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimiser's state by parameter; `step` in it, where there is one, counts its steps."""


class StepSource(Protocol):
    """The part of a job that takes steps, as adaptation sees it."""

    @property
    def meter(self) -> NoiseMeter | None:
        """The meter of gradient noise; None where there is none."""

    @property
    def optimizer(self) -> GroupedOptimizer:
        """The optimiser whose learning rates are scaled."""

    @property
    def clock(self) -> StepTimer:
        """Times the steps."""

    def losses(self) -> tuple[float, int]:
        """Sum over steps of this replica's share of the mean loss, and the number of steps, since the last call."""

    def predicted_local_batch(self, local_batch: int) -> int | None:
        """The largest local batch that should fit into memory, if `local_batch` runs now; None: not known."""


class ReplicaExchange(Protocol):
    """The replicas that decide together."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes that they run on."""

    def gather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """The numbers of all replicas, a row for each, equal on all of them; a collective."""

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """The sums over replicas of signed 64-bit integers, which wrap around; a collective."""
