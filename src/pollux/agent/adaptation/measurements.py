"""What adaptation asks of the framework that takes the steps: times, gradient noise, losses, exchanged numbers.

PyTorch's implementations are in `step` and `distributed`; another framework supplies its own.
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
    """One step's times in seconds: the whole step, the host's wait for data, and, where it was told apart, the
    forward and backward pass of one micro-step (`compute_seconds`)."""

    step_seconds: float
    data_seconds: float
    compute_seconds: float | None
    repeats: int
    local_batch: int
    measured: bool


class NoiseRows(Protocol):
    """Squared gradient lengths of the steps that were measured since the last call, a row for each step.

    `parts` and `whole` have a column for each parameter group. `parts` and `counts` are this replica's own share and
    are added up over replicas; `whole` and `totals` are the same on all of them. See `noise_scale.estimates`.
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
        """Which preconditioner: "plain", "adam" and so on; "cold" before an optimiser that has one has stepped."""

    @property
    def is_warm(self) -> bool:
        """Whether the preconditioner has seen enough steps for measuring to make sense."""

    def collect(self) -> NoiseRows:
        """The rows since the last call; does not wait for a device."""


class StepTimer(Protocol):
    """Times steps."""

    @property
    def includes_data_wait(self) -> bool:
        """Whether times of computing contain the wait for data, as on a device that runs behind the host."""

    def begin(self, told_apart: bool) -> None:
        """A step begins; `told_apart`: computing is to be timed apart from the rest of it."""

    def waited(self, seconds: float) -> None:
        """The host waited for data."""

    def end(self, repeats: int, local_batch: int, measured: bool) -> None:
        """The optimiser has stepped."""

    def drain(self) -> list[StepTime]:
        """The steps that are over since the last call."""


class GroupedOptimizer(Protocol):
    """An optimiser with parameter groups: mappings with a learning rate `lr` and other options."""

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        """The groups."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """By parameter, what the optimiser keeps of it; `step` counts its steps, where it does."""


class StepSource(Protocol):
    """Where steps are taken, as far as measuring them goes."""

    @property
    def meter(self) -> NoiseMeter | None:
        """Measures gradient noise; None: nothing does."""

    @property
    def optimizer(self) -> GroupedOptimizer:
        """Whose parameter groups have noise and learning rates."""

    @property
    def clock(self) -> StepTimer:
        """Times the steps."""

    def losses(self) -> tuple[float, int]:
        """Sum over steps of this replica's share of the mean loss, and the number of steps, since the last call."""

    def predicted_local_batch(self, local_batch: int) -> int | None:
        """The largest local batch that memory should hold, where `local_batch` runs now; None: cannot be told."""


class ReplicaExchange(Protocol):
    """The replicas that decide together."""

    @property
    def num_replicas(self) -> int:
        """How many there are."""

    @property
    def num_nodes(self) -> int:
        """How many nodes they run on."""

    def gather(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        """Everyone's numbers, one row for each replica, the same on all of them; a collective."""

    def sum_integers(self, values: Sequence[int]) -> list[int]:
        """The sums of everyone's signed 64-bit integers, which wrap around; a collective."""
