"""How many GPUs each job should have: a multiple-choice knapsack over options, ignoring where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Options", "choose"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Beyond this many table cells the dynamic program costs more than prices, which are then as good.
_EXACT_CELLS = 1_000_000
# Few jobs on several GPU types, or under quotas: prices divide them badly, an integer program well.
_PROGRAM_CELLS = 1_500
_PROGRAM_NODES = 500
# Beyond this range of costs the program's tolerances would decide.
_PROGRAM_RANGE = 1e7
# Prices are found to this precision; what they leave over is handed out one by one.
_PRICE_TOLERANCE = 0.01
_SWEEPS = 3
_PASSES = 64
# Gains below this share of a cost are rounding.
_NO_GAIN = 1e-12


@dataclass(frozen=True, slots=True)
class Options:
    """Options of every job, all of shape [jobs, options]; `cost` is infinite where an option is closed.

    `pool` says which GPU type an option draws on; `queue` (per job) which quota, -1 for none.
    """

    cost: FloatArray
    gpus: IntArray
    pool: IntArray
    queue: IntArray
    capacity: IntArray
    quota: IntArray

    def closing(self, jobs: Sequence[int], columns: Sequence[int]) -> Options | None:
        """A copy without these options of these jobs, except if a job had no other; `None` if nothing changes."""
        cost = self.cost.copy()
        for j in jobs:
            row = cost[j].copy()
            row[list(columns)] = np.inf
            if np.isfinite(row).any():
                cost[j] = row
        return None if np.array_equal(cost, self.cost) else replace(self, cost=cost)


def choose(options: Options) -> IntArray:
    """The option of each job with the least total cost that fits all pools and quotas (near-exact)."""
    jobs = len(options.cost)
    if not jobs:
        return np.zeros(0, dtype=np.int64)
    cells = options.cost.size * (int(options.capacity.sum()) + 1)
    if len(options.capacity) == 1 and not len(options.quota) and cells <= _EXACT_CELLS:
        return _exact(options)
    if options.cost.size <= _PROGRAM_CELLS:
        chosen = _by_program(options)
        if chosen is not None:
            return chosen
    return _by_prices(options)


def _exact(options: Options) -> IntArray:
    """Dynamic program over GPUs left: best[g] of jobs so far within g GPUs."""
    capacity = int(options.capacity[0])
    jobs = len(options.cost)
    picks = np.zeros((jobs, capacity + 1), dtype=np.int64)
    grid = np.arange(capacity + 1)
    offered = np.isfinite(options.cost)
    # Indices below zero GPUs fall into a margin of infinite cost on the left.
    margin = int(options.gpus.max(initial=0))
    best = np.zeros(margin + capacity + 1)
    best[:margin] = np.inf
    for j in range(jobs):
        indices = np.flatnonzero(offered[j])
        if not len(indices):
            continue
        left = grid - options.gpus[j, indices][:, None] + margin
        candidates = best[left] + options.cost[j, indices][:, None]
        winners = candidates.argmin(axis=0)
        picks[j] = indices[winners]
        best[margin:] = candidates[winners, grid]
    chosen = np.zeros(jobs, dtype=np.int64)
    room = capacity
    for j in range(jobs - 1, -1, -1):
        chosen[j] = picks[j, room]
        # Jobs that may not be moved can hold more than there is; then nothing is left for the others.
        room = max(room - int(options.gpus[j, chosen[j]]), 0)
    return chosen


def _by_program(options: Options) -> IntArray | None:
    """The same choice as an integer program, one variable per open option; `None` where it cannot be solved."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    jobs, indices = np.nonzero(np.isfinite(options.cost))
    cost, gpus = options.cost[jobs, indices], options.gpus[jobs, indices]
    if len(np.unique(jobs)) < len(options.cost) or np.ptp(cost) > _PROGRAM_RANGE:
        return None
    variables = np.arange(len(jobs))
    one_each = csr_array((np.ones(len(jobs)), (jobs, variables)), shape=(len(options.cost), len(jobs)))
    queued = np.flatnonzero(options.queue[jobs] >= 0)
    rows = np.concatenate([options.pool[jobs, indices], len(options.capacity) + options.queue[jobs[queued]]])
    columns = np.concatenate([variables, queued])
    limits = np.concatenate([options.capacity, options.quota])
    use = csr_array((gpus[columns], (rows, columns)), shape=(len(limits), len(jobs)))
    result = milp(
        cost,
        integrality=np.ones(len(jobs), dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(use, -np.inf, limits)],
        options={"mip_rel_gap": 1e-3, "node_limit": _PROGRAM_NODES},
    )
    if result.x is None:
        return None
    chosen = np.zeros(len(options.cost), dtype=np.int64)
    taken = result.x > 0.5
    chosen[jobs[taken]] = indices[taken]
    return chosen


class _Ledger:
    """GPUs that a choice leaves free, by pool and by quota; negative where it uses too many."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows = np.arange(len(options.cost))
        self.num_pools = len(options.capacity)
        self.limits = np.concatenate([options.capacity, options.quota]).astype(float)
        self._queued = np.flatnonzero(options.queue >= 0)
        # Jobs without a quota share a last entry without a limit.
        self.queue = np.where(options.queue >= 0, options.queue + self.num_pools, len(self.limits))

    def free(self, chosen: IntArray) -> FloatArray:
        """What is left of every limit."""
        options = self.options
        gpus = options.gpus[self.rows, chosen]
        pools = np.bincount(options.pool[self.rows, chosen], gpus, self.num_pools)
        queued = self._queued
        quotas = (
            np.bincount(options.queue[queued], gpus[queued], len(options.quota)) if len(queued) else options.quota * 0
        )
        left: FloatArray = self.limits - np.concatenate([pools, quotas])
        return left

    def priced(self, prices: FloatArray) -> IntArray:
        """The cheapest option of each job when GPUs cost `prices`."""
        options = self.options
        each = prices[options.pool]
        if len(options.quota):
            each = each + np.append(prices, 0.0)[self.queue][:, None]
        picked: IntArray = (options.cost + each * options.gpus).argmin(axis=1)
        return picked


def _by_prices(options: Options) -> IntArray:
    """A price per GPU for every pool and quota, each found by bisection; then repair and fill."""
    ledger = _Ledger(options)
    prices = np.zeros(len(ledger.limits))
    chosen = ledger.priced(prices)
    finite = options.cost[np.isfinite(options.cost)]
    ceiling = float(np.ptp(finite)) + 1.0 if len(finite) else 1.0
    for _ in range(_SWEEPS if len(prices) > 1 else 1):
        before = prices.copy()
        for r in np.flatnonzero((ledger.free(chosen) < 0) | (prices > 0)).tolist():
            _find_price(ledger, prices, r, ceiling)
        chosen = ledger.priced(prices)
        if np.allclose(prices, before, rtol=_PRICE_TOLERANCE):
            break
    _repair(ledger, chosen)
    _fill(ledger, chosen)
    return chosen


def _find_price(ledger: _Ledger, prices: FloatArray, r: int, ceiling: float) -> None:
    """The least price of one limit, the others as they are, at which it is not exceeded."""
    prices[r] = 0.0
    if ledger.free(ledger.priced(prices))[r] >= 0:
        return
    # Costs v^p span many orders of magnitude when p is far below zero; each costs one more halving.
    low, high = ceiling * 1e-60, ceiling
    while high > low * (1.0 + _PRICE_TOLERANCE):
        prices[r] = np.sqrt(low * high)
        if ledger.free(ledger.priced(prices))[r] < 0:
            low = prices[r]
        else:
            high = prices[r]
    prices[r] = high


def _repair(ledger: _Ledger, chosen: IntArray) -> None:
    """Step down, cheapest per GPU first, until every limit holds; prices alone may leave a little too much."""
    options, rows = ledger.options, ledger.rows
    for _ in range(_PASSES):
        free = np.append(ledger.free(chosen), np.inf)
        if (free >= 0).all():
            return
        gpus, cost = options.gpus[rows, chosen], options.cost[rows, chosen]
        freed = gpus[:, None] - options.gpus
        burdened = (free[options.pool[rows, chosen]] < 0) | (free[ledger.queue] < 0)
        with np.errstate(invalid="ignore"):
            ratio = (options.cost - cost[:, None]) / np.maximum(freed, 1)
        ratio[(freed <= 0) | ~burdened[:, None] | ~np.isfinite(ratio)] = np.inf
        steps = ratio.argmin(axis=1)
        for j in np.argsort(ratio[rows, steps], kind="stable").tolist():
            pool, queue = options.pool[j, chosen[j]], ledger.queue[j]
            if ratio[j, steps[j]] == np.inf:
                break
            if free[pool] < 0 or free[queue] < 0:
                _switch(ledger, chosen, free, j, int(steps[j]))


def _fill(ledger: _Ledger, chosen: IntArray) -> None:
    """Use what is left: the best improvements per GPU that fit, until nothing does."""
    options, rows = ledger.options, ledger.rows
    for _ in range(_PASSES):
        free = np.append(ledger.free(chosen), np.inf)
        gpus, cost = options.gpus[rows, chosen], options.cost[rows, chosen]
        same = options.pool == options.pool[rows, chosen][:, None]
        extra = options.gpus - np.where(same, gpus[:, None], 0)
        fits = (extra <= free[options.pool]) & (options.gpus - gpus[:, None] <= free[ledger.queue][:, None])
        gain = np.where(fits, cost[:, None] - options.cost, 0.0)
        ratio = np.where(gain > _NO_GAIN * np.abs(cost[:, None]), gain / np.maximum(extra, 0.5), 0.0)
        steps = ratio.argmax(axis=1)
        best = ratio[rows, steps]
        changed = False
        for j in np.argsort(-best, kind="stable").tolist():
            if best[j] <= 0.0:
                break
            step = int(steps[j])
            if (
                extra[j, step] <= free[options.pool[j, step]]
                and options.gpus[j, step] - gpus[j] <= free[ledger.queue[j]]
            ):
                _switch(ledger, chosen, free, j, step)
                changed = True
        if not changed:
            return


def _switch(ledger: _Ledger, chosen: IntArray, free: FloatArray, j: int, option: int) -> None:
    options, old = ledger.options, chosen[j]
    free[options.pool[j, old]] += options.gpus[j, old]
    free[options.pool[j, option]] -= options.gpus[j, option]
    free[ledger.queue[j]] += options.gpus[j, old] - options.gpus[j, option]
    chosen[j] = option
