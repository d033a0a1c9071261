"""A third throughput model: the published one, corrected by measurements near a placement.

The published form misfits real step times by some 10 %, and by more on some placements than on others. Its error
where a job has run is known: that corrects the prediction there and, less, at similar sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pollux.core.errors import InvalidInput
from pollux.goodput.fit import Observation
from pollux.goodput.throughput import FloatArray, PublishedThroughput, Quantity, SyncBasis, ThroughputModel

__all__ = ["MOST_PLACES", "CorrectedThroughput", "corrected", "place_factors"]

MOST_PLACES = 32
"""The most places that a correction remembers; the last ones measured."""

# Where nothing was measured: the weight of "no correction" against measurements at nearby places.
_PRIOR_NEARBY = 0.5
# The weight of a place on one node for one on several, and the reverse, relative to a place of the same sort.
_OTHER_SORT = 0.3
# No good measurement is off by more than e to this power.
_MOST_LOG = 1.0
# A fit whose errors are below this stays uncorrected.
_LEAST_LOG = 1e-3
_MOST_GPUS = 1e9


@dataclass(frozen=True, slots=True)
class CorrectedThroughput:
    """T_iter of `base`, Eq. (G6), times e^ρ; ρ = ρ_p at a measured place p, else Σ_p κ_p·ρ_p / (1/2 + Σ_p κ_p).

    `places` are (nodes, GPUs, ρ_p), `table` the same as an array. κ_p = e^(−|log2 K − log2 K_p|), times 0.3 where one
    of the two is on one node and the other on several. The factor does not depend on the batch, so that the best batch
    of a placement is that of `base`; T_grad and T_sync are those of `base`.
    """

    base: PublishedThroughput
    places: tuple[tuple[int, int, float], ...] = ()
    table: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.places, dtype=float).reshape(-1, 3))
        if len(self.places) > MOST_PLACES:
            raise InvalidInput(f"a correction has {len(self.places)} places; give at most {MOST_PLACES}")
        if len({place[:2] for place in self.places}) < len(self.places):
            raise InvalidInput("a correction names a place twice; give each once")
        for nodes, gpus, value in self.places:
            if not 1 <= nodes <= gpus < _MOST_GPUS:
                raise InvalidInput(
                    f"a correction is for {nodes} nodes and {gpus} GPUs: give 1 to as many nodes as GPUs"
                )
            if not abs(value) <= _MOST_LOG:
                raise InvalidInput(f"a correction is {value}: give a number from -{_MOST_LOG:g} to {_MOST_LOG:g}")

    @property
    def overlap(self) -> float:
        """γ of `base`."""
        return self.base.overlap

    @property
    def parameters(self) -> tuple[float, float, float, float, float, float, float]:
        """The parameters of `base`."""
        return self.base.parameters

    @property
    def sync_basis(self) -> SyncBasis:
        """The basis of `base`."""
        return self.base.sync_basis

    def compute_seconds(self, local_batch: Quantity) -> Quantity:
        """T_grad(m) of `base`."""
        return self.base.compute_seconds(local_batch)

    def sync_seconds(self, num_nodes: Quantity, num_gpus: Quantity) -> Quantity:
        """T_sync(N, K) of `base`."""
        return self.base.sync_seconds(num_nodes, num_gpus)

    def step_seconds(
        self, num_nodes: Quantity, num_gpus: Quantity, local_batch: Quantity, accumulation: Quantity | int = 0
    ) -> Quantity:
        """T_iter of `base`, times the factor of the placement."""
        seconds = self.base.step_seconds(num_nodes, num_gpus, local_batch, accumulation)
        if isinstance(num_nodes, np.ndarray) or isinstance(num_gpus, np.ndarray):
            nodes, gpus = np.broadcast_arrays(np.asarray(num_nodes, float), np.asarray(num_gpus, float))
            factors = place_factors([self], nodes.ravel(), gpus.ravel()).reshape(nodes.shape)
            result: Quantity = seconds * factors
            return result
        return seconds * self.factor(num_nodes, num_gpus)

    def factor(self, num_nodes: float, num_gpus: float) -> float:
        """T_iter on a placement, relative to that of `base`."""
        total, weights = 0.0, _PRIOR_NEARBY
        for nodes, gpus, value in self.places:
            if nodes == num_nodes and gpus == num_gpus:
                return math.exp(value)
            weight = math.exp(-abs(math.log2(num_gpus / gpus)))
            if (nodes > 1) != (num_nodes > 1):
                weight *= _OTHER_SORT
            total += weight * value
            weights += weight
        return math.exp(total / weights)


def corrected(base: PublishedThroughput, rows: Sequence[Observation]) -> PublishedThroughput | CorrectedThroughput:
    """A fit corrected by its residuals: ρ_p is the mean of log(measured/fitted) of a place.

    The mean is over the local batches that were measured there, by weight. Returns `base` if it fits.
    """
    places = [
        (nodes, gpus, min(max(total / weights, -_MOST_LOG), _MOST_LOG))
        for (nodes, gpus), (total, weights) in _left_over(base, rows).items()
        if nodes <= gpus
    ][-MOST_PLACES:]
    if all(abs(value) < _LEAST_LOG for _, _, value in places):
        return base
    return CorrectedThroughput(base, tuple(places))


def _left_over(base: PublishedThroughput, rows: Sequence[Observation]) -> dict[tuple[int, int], tuple[float, float]]:
    """Residuals of a fit: by place, the weighted sum of log(measured/fitted), and the sum of the weights."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    usual = sum(row.weight for row in rows) / len(rows) if rows else 1.0
    for row in rows:
        place = row.num_nodes, row.num_gpus
        fitted = base.step_seconds(float(row.num_nodes), float(row.num_gpus), float(row.local_batch))
        if not (row.weight > 0.0 and row.step_seconds > 0.0 and math.isfinite(row.step_seconds) and fitted > 0.0):
            continue
        weight = row.weight / usual
        total, weights = sums.pop(place, (0.0, 0.0))
        sums[place] = total + weight * math.log(row.step_seconds / fitted), weights + weight
    return sums


def place_factors(times: Sequence[ThroughputModel], num_nodes: FloatArray, num_gpus: FloatArray) -> FloatArray:
    """`factor` of many models (rows; 1 for models of other kinds) on many placements (columns), shape [J, S]."""
    factors = np.ones((len(times), len(num_gpus)))
    if not len(num_gpus):
        return factors
    # Jobs of one kind share their measurements, so each table is computed once.
    tables: dict[int, FloatArray] = {}
    members: dict[int, list[int]] = {}
    for row, model in enumerate(times):
        if isinstance(model, CorrectedThroughput) and model.places:
            tables[id(model.places)] = model.table
            members.setdefault(id(model.places), []).append(row)
    if tables:
        found = _table_factors(list(tables.values()), num_nodes, num_gpus)
        for factor, rows in zip(found, members.values(), strict=True):
            factors[rows] = factor
    return factors


def _table_factors(tables: Sequence[FloatArray], num_nodes: FloatArray, num_gpus: FloatArray) -> FloatArray:
    """The factors of each table of (nodes, GPUs, ρ_p); weights between places are computed once for all."""
    rows = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    known = np.concatenate(tables)
    _, first, which = np.unique(known[:, 0] * _MOST_GPUS + known[:, 1], return_index=True, return_inverse=True)
    values, present = np.zeros((2, len(tables), len(first)))
    values[rows, which] = known[:, 2]
    present[rows, which] = 1.0
    nodes, gpus = known[first, :1], known[first, 1:2]
    weights = np.exp(-np.abs(np.log2(num_gpus) - np.log2(gpus)))
    weights *= np.where((nodes > 1) == (num_nodes > 1), 1.0, _OTHER_SORT)
    logs = (values @ weights) / (_PRIOR_NEARBY + present @ weights)
    for place, column in zip(*np.nonzero((nodes == num_nodes) & (gpus == num_gpus)), strict=True):
        logs[:, column] = np.where(present[:, place] > 0.0, values[:, place], logs[:, column])
    result: FloatArray = np.exp(logs)
    return result
