"""The exchange of a round: each replica gives a row of numbers, and all read the same table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pollux.agent.adaptation.measurements import NoiseRows, ReplicaExchange
from pollux.goodput import PublishedThroughput

__all__ = ["RoundNumbers", "RoundTable", "SummedNoise", "exchange"]

_Floats = npt.NDArray[np.float64]
_PARAMETERS = 7
_MODEL = 5
_NOISE = _MODEL + 1 + _PARAMETERS


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    """One replica's measurements of a round.

    `loss_sum` is the sum over `num_losses` steps of this replica's share of the mean loss. `step_seconds` is the median
    of steps without measuring, `measuring_cost` the relative time that measuring adds; both NaN without such steps.
    `memory_holds` is the largest local batch that memory should hold, None where that is not known.
    """

    loss_sum: float
    num_losses: int
    step_seconds: float
    measuring_cost: float
    memory_holds: int | None
    model: PublishedThroughput | None
    noise: NoiseRows | None


@dataclass(frozen=True, slots=True)
class SummedNoise:
    """Noise rows of a round with the shares of all replicas added up."""

    parts: _Floats
    whole: _Floats
    counts: _Floats
    totals: _Floats


@dataclass(frozen=True, slots=True)
class RoundTable:
    """The numbers that all replicas decide from: equal on each of them to the last bit.

    Times and the throughput model are those of replica 0, `memory_holds` is the least of all.
    """

    mean_loss: float | None
    step_seconds: float
    measuring_cost: float
    memory_holds: int | None
    model: PublishedThroughput | None
    noise: SummedNoise | None


def exchange(mine: RoundNumbers, replicas: ReplicaExchange) -> RoundTable:
    """Exchange the numbers of all replicas; a collective."""
    rows = mine.noise
    arrays = [] if rows is None else [_floats(each) for each in (rows.parts, rows.whole, rows.counts)]
    noise = [value for each in arrays for value in each.reshape(-1).tolist()]
    table = replicas.gather([*_row(mine), *noise])
    first = table[0]
    return RoundTable(
        mean_loss=float(table[:, 0].sum() / first[1]) if first[1] else None,
        step_seconds=float(first[2]),
        measuring_cost=float(first[3]),
        memory_holds=int(min(table[:, 4])) or None,
        model=PublishedThroughput(*(float(each) for each in first[_MODEL + 1 : _NOISE])) if first[_MODEL] else None,
        noise=None if rows is None else _summed(table[:, _NOISE:], arrays[0].shape, _floats(rows.totals)),
    )


def _row(mine: RoundNumbers) -> list[float]:
    """A replica's numbers without the noise, whose length varies."""
    model = [0.0] * (1 + _PARAMETERS) if mine.model is None else [1.0, *mine.model.parameters]
    memory_holds = float(mine.memory_holds or 0)
    return [mine.loss_sum, float(mine.num_losses), mine.step_seconds, mine.measuring_cost, memory_holds, *model]


def _floats(values: Any) -> _Floats:
    return np.asarray(values, dtype=np.float64)


def _summed(columns: _Floats, shape: tuple[int, ...], totals: _Floats) -> SummedNoise:
    size = int(np.prod(shape))
    # `whole` may differ between replicas by rounding, and decisions must not: all use replica 0's.
    return SummedNoise(
        parts=columns[:, :size].sum(axis=0).reshape(shape),
        whole=columns[0, size : 2 * size].reshape(shape),
        counts=columns[:, 2 * size :].sum(axis=0),
        totals=totals,
    )
