"""How many GPUs each job should have: a multiple-choice knapsack over options, ignoring where they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Options", "choose"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Beyond this many table cells the dynamic program costs more than prices, which are then as good.
_EXACT_CELLS = 1_000_000
_BISECTIONS = 40
_SWEEPS = 4


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


def choose(options: Options) -> IntArray:
    """The option of each job with the least total cost that fits all pools and quotas (near-exact)."""
    jobs = len(options.cost)
    if not jobs:
        return np.zeros(0, dtype=np.int64)
    cells = options.cost.size * (int(options.capacity.sum()) + 1)
    if len(options.capacity) == 1 and not len(options.quota) and cells <= _EXACT_CELLS:
        return _exact(options)
    return _by_prices(options)


def _exact(options: Options) -> IntArray:
    """Dynamic program over GPUs left: best[g] of jobs so far within g GPUs."""
    capacity = int(options.capacity[0])
    jobs = len(options.cost)
    best = np.zeros(capacity + 1)
    picks = np.zeros((jobs, capacity + 1), dtype=np.int64)
    grid = np.arange(capacity + 1)
    for j in range(jobs):
        left = grid[None, :] - options.gpus[j][:, None]
        candidates = np.where(left >= 0, best[np.maximum(left, 0)], np.inf) + options.cost[j][:, None]
        picks[j] = candidates.argmin(axis=0)
        best = candidates[picks[j], grid]
    chosen = np.zeros(jobs, dtype=np.int64)
    room = capacity
    for j in range(jobs - 1, -1, -1):
        chosen[j] = picks[j, room]
        room -= int(options.gpus[j, chosen[j]])
    return chosen


class _Usage:
    """GPUs that a choice uses, by pool and by quota."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rows = np.arange(len(options.cost))
        self.limits = np.concatenate([options.capacity, options.quota])

    def of(self, chosen: IntArray) -> FloatArray:
        gpus = self.options.gpus[self.rows, chosen]
        pools = np.bincount(self.options.pool[self.rows, chosen], gpus, len(self.options.capacity))
        queued = self.options.queue >= 0
        quotas = np.bincount(self.options.queue[queued], gpus[queued], len(self.options.quota))
        return np.concatenate([pools, quotas[: len(self.options.quota)]])


def _by_prices(options: Options) -> IntArray:
    """A price per GPU for every pool and quota, each found by bisection; then repair and fill."""
    usage = _Usage(options)
    num_pools = len(options.capacity)
    finite = np.where(np.isfinite(options.cost), options.cost, 0.0)
    ceiling = float(np.ptp(finite)) + 1.0
    prices = np.zeros(len(usage.limits))
    member = [options.queue == q for q in range(len(options.quota))]

    def pick() -> IntArray:
        priced = options.cost + prices[options.pool] * options.gpus
        for q, rows in enumerate(member):
            if prices[num_pools + q]:
                priced[rows] += prices[num_pools + q] * options.gpus[rows]
        picked: IntArray = priced.argmin(axis=1)
        return picked

    chosen = pick()
    for _ in range(_SWEEPS if len(prices) > 1 else 1):
        if (usage.of(chosen) <= usage.limits).all() and not prices.any():
            break
        for r in range(len(prices)):
            low, high = 0.0, ceiling
            prices[r] = 0.0
            if usage.of(pick())[r] <= usage.limits[r]:
                continue
            for _ in range(_BISECTIONS):
                prices[r] = np.sqrt(max(low, ceiling * 1e-12) * high)
                if usage.of(pick())[r] > usage.limits[r]:
                    low = prices[r]
                else:
                    high = prices[r]
                if high - low <= 1e-4 * high:
                    break
            prices[r] = high
        chosen = pick()
    return _fill(options, usage, _repair(options, usage, chosen))


def _repair(options: Options, usage: _Usage, chosen: IntArray) -> IntArray:
    """Step down, cheapest per GPU first, until every limit holds; prices alone may leave a little too much."""
    num_pools = len(options.capacity)
    while True:
        over = usage.of(chosen) > usage.limits
        if not over.any():
            return chosen
        gpus, cost = options.gpus[usage.rows, chosen], options.cost[usage.rows, chosen]
        burdened = over[options.pool[usage.rows, chosen]]
        if over[num_pools:].any():
            burdened |= (options.queue >= 0) & over[num_pools:][np.maximum(options.queue, 0)]
        freed = gpus[:, None] - options.gpus
        with np.errstate(invalid="ignore"):
            ratio = np.where(
                (freed > 0) & burdened[:, None], (options.cost - cost[:, None]) / np.maximum(freed, 1), np.inf
            )
        flat = int(ratio.argmin())
        job, option = divmod(flat, options.cost.shape[1])
        if not np.isfinite(ratio.flat[flat]):
            return chosen
        chosen[job] = option


def _fill(options: Options, usage: _Usage, chosen: IntArray) -> IntArray:
    """Use what is left: the best improvement per GPU that fits, again and again."""
    num_pools = len(options.capacity)
    while True:
        slack = usage.limits - usage.of(chosen)
        gpus, cost = options.gpus[usage.rows, chosen], options.cost[usage.rows, chosen]
        same = options.pool == options.pool[usage.rows, chosen][:, None]
        extra = options.gpus - np.where(same, gpus[:, None], 0)
        fits = extra <= slack[:num_pools][options.pool]
        if len(options.quota):
            left = np.where(options.queue >= 0, slack[num_pools:][np.maximum(options.queue, 0)], np.inf)
            fits &= options.gpus - gpus[:, None] <= left[:, None]
        gain = np.where(fits, cost[:, None] - options.cost, -np.inf)
        ratio = np.where(gain > 1e-12, gain / np.maximum(extra, 0.5), 0.0)
        flat = int(ratio.argmax())
        if ratio.flat[flat] <= 0.0:
            return chosen
        job, option = divmod(flat, options.cost.shape[1])
        chosen[job] = option
