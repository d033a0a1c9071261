"""NSGA-II (Deb et al., 2002) over matrices of GPUs by job and node, on whole populations at once.

Knows arrays only: `genetic` says which jobs and nodes they stand for, and what a matrix is worth.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

__all__ = ["Found", "Space", "crowding_distances", "non_dominated_ranks", "search"]

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

_RESET_ROW = 0.1
_THIN_ROW = 0.1
_CLEAR_ELEMENT = 0.1
# Small spaces run out of new matrices; then a generation has fewer children.
_MATING_ATTEMPTS = 10
_SLACK = 1e-9
_PER_JOB = ("current", "lost", "most", "min_gpus", "max_gpus", "max_nodes", "one_type", "needs", "queue")


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Which matrices are legal, and the moves between them; rows are jobs, in the order in which they are served.

    The first `num_pinned` rows never change; the next `num_kept` are jobs that may be resized, not stopped.
    `lost` are GPUs that jobs hold on nodes that are gone; `most` is how many GPUs a job may get on a
    node at most.
    `needs` and `stock` are further resources, per GPU and per node. `queue` is a job's index into `quota`, -1
    for none. `shared` are the nodes on which the traffic of distributed jobs would collide.
    """

    current: IntArray
    lost: IntArray
    most: IntArray
    gpus: IntArray
    min_gpus: IntArray
    max_gpus: IntArray
    max_nodes: IntArray
    node_type: IntArray
    one_type: BoolArray
    shared: BoolArray
    needs: FloatArray
    stock: FloatArray
    queue: IntArray
    quota: IntArray
    num_pinned: int = 0
    num_kept: int = 0
    home: IntArray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.current)
        if self.num_kept:
            object.__setattr__(self, "home", self._find_home())

    def _find_home(self) -> IntArray:
        """Rows to which jobs that may not be stopped can always return; together they are legal.

        A row is what the job has now, cut to what is allowed now. A job for which too little would be left
        stays exactly as it is, which is always legal, and is served before the others.
        """
        num_jobs, rng = len(self.current), np.random.default_rng(0)
        kept = range(self.num_pinned, self.num_pinned + self.num_kept)
        stuck: list[int] = []
        while True:
            free = [j for j in range(self.num_pinned, num_jobs) if j not in stuck]
            order = [*range(self.num_pinned), *stuck, *free]
            fixed = self.num_pinned + len(stuck)
            rows = {name: getattr(self, name)[order] for name in _PER_JOB}
            # Sharing a network is no reason to be cut.
            apart = replace(self, **rows, shared=np.zeros_like(self.shared), num_pinned=fixed, num_kept=0)
            home = np.empty_like(self.current)
            home[order] = apart.repair(apart.current[None].copy(), rng)[0]
            short = [j for j in kept if j not in stuck and home[j].sum() < self.min_gpus[j]]
            if not short:
                return home
            stuck += short

    def crossover(self, parents: IntArray, rng: np.random.Generator) -> IntArray:
        """Two children of each pair of parents [2, pairs, jobs, nodes]: one cut over the jobs."""
        num_jobs = parents.shape[2]
        cuts = rng.integers(0, num_jobs, size=parents.shape[1], dtype=np.int32)
        swapped = np.arange(num_jobs) < cuts.reshape(-1, 1)
        children: IntArray = np.where(swapped[None, :, :, None], parents[::-1], parents)
        return children.reshape(-1, *parents.shape[2:])

    def mutate(self, states: IntArray, rng: np.random.Generator) -> None:
        """Change matrices in place: reset rows to the current ones, clear elements, and hand out free GPUs."""
        rows, members = np.nonzero(rng.random(states.shape[:2], dtype=np.float32) < _RESET_ROW)
        states[rows, members] = self.current[members]
        rows, members = np.nonzero(rng.random(states.shape[:2], dtype=np.float32) < _THIN_ROW)
        cleared = rng.random((len(rows), states.shape[2]), dtype=np.float32) < _CLEAR_ELEMENT
        states[rows, members] = np.where(cleared, 0, states[rows, members])
        self._grow(states, rng)

    def _grow(self, states: IntArray, rng: np.random.Generator) -> None:
        """On nodes with free GPUs, about one job that fits and about one that is there draw a new count.

        It is uniform from what the job has to the most that the node may give; `repair` takes GPUs that are not
        free from later jobs.
        """
        fits, present = self.most > 0, states > 0
        free = np.einsum("pjn->pn", states) < self.gpus
        newcomer = _about_one(fits.sum(axis=0), free)
        resident = _about_one(np.einsum("pjn->pn", present, dtype=np.int32), free)
        chances = fits * newcomer[:, None, :] + present * (resident * (1 - newcomer))[:, None, :]
        individuals, members, nodes = np.nonzero(rng.random(states.shape, dtype=np.float32) < chances)
        low = states[individuals, members, nodes]
        span = np.maximum(self.most[members, nodes] - low, 0) + 1
        states[individuals, members, nodes] = low + (rng.random(len(low)) * span).astype(np.int32)

    def repair(self, states: IntArray, rng: np.random.Generator) -> IntArray:
        """Make matrices legal by taking GPUs away, in place.

        Where a job that may not be stopped would fall below its minimum, all such jobs return to `home`.
        """
        self._repair(states, self.num_pinned, rng)
        if self.num_kept:
            kept = slice(self.num_pinned, self.num_pinned + self.num_kept)
            short = (states[:, kept].sum(axis=2) < self.min_gpus[kept]).any(axis=1)
            if short.any():
                again = states[short]
                self._repair(again, kept.stop, rng)
                states[short] = again
        return states

    def _repair(self, states: IntArray, first: int, rng: np.random.Generator) -> None:
        """Set the rows before `first` to `home`, and serve them before all others."""
        states[:, :first] = self.home[:first]
        free = states[:, first:]
        np.minimum(free, self.most[first:], out=free)
        if self.one_type.any():
            self._keep_one_type(states, first)
        if self.shared.any():
            self._separate(states, first)
        self._cap(free, np.broadcast_to(self.max_gpus[first:], free.shape[:2]), first, rng)
        if len(self.quota):
            self._cap(free, self._within_quota(states, first), first, rng)
        self._fit(states, first)
        free[np.einsum("pjn->pj", free) < self.min_gpus[first:]] = 0

    def _keep_one_type(self, states: IntArray, first: int) -> None:
        """Jobs that may not mix GPU types keep the one of which they have most."""
        types = range(int(self.node_type.max()) + 1)
        held = np.stack([states[:, :, self.node_type == t].sum(axis=2) for t in types], axis=2)
        other = held.argmax(axis=2)[:, :, None] != self.node_type
        other &= self.one_type[:, None]
        other[:, :first] = False
        states[other] = 0

    def _separate(self, states: IntArray, first: int) -> None:
        """Of the distributed jobs on a node only the first keeps it."""
        present = states > 0
        distributed = np.einsum("pjn->pj", present, dtype=np.int32) > 1
        present &= distributed[:, :, None]
        present &= self.shared
        later = present.cumsum(axis=1, dtype=np.int16) > 1
        later &= present
        later[:, :first] = False
        states[later] = 0

    def _cap(self, rows: IntArray, caps: IntArray, first: int, rng: np.random.Generator) -> None:
        """Cut rows to `caps` [population, jobs] GPUs and to their numbers of nodes, nodes in random order."""
        most_nodes = self.max_nodes[first:]
        over = np.einsum("pjn->pj", rows) > caps
        if rows.shape[2] > most_nodes.min(initial=rows.shape[2]):
            over |= (rows > 0).sum(axis=2) > most_nodes
        individuals, members = np.nonzero(over)
        if not len(individuals):
            return
        order = rng.random((len(individuals), rows.shape[2]), dtype=np.float32).argsort(axis=1)
        cut = np.take_along_axis(rows[individuals, members], order, axis=1)
        cut[np.cumsum(cut > 0, axis=1) > most_nodes[members, None]] = 0
        cut = np.diff(np.minimum(cut.cumsum(axis=1), caps[individuals, members, None]), axis=1, prepend=0)
        result = np.empty_like(cut)
        np.put_along_axis(result, order, cut, axis=1)
        rows[individuals, members] = result

    def _within_quota(self, states: IntArray, first: int) -> IntArray:
        """GPUs that each job may hold if earlier ones of its queue are served first."""
        totals: IntArray = np.einsum("pjn->pj", states)
        for q, quota in enumerate(self.quota):
            members = np.flatnonzero(self.queue == q)
            before, members = members[members < first], members[members >= first]
            held = int(self.home[before].sum() + self.lost[before].sum())
            running = np.minimum(totals[:, members].cumsum(axis=1), max(int(quota) - held, 0))
            totals[:, members] = np.diff(running, axis=1, prepend=0)
        return totals[:, first:]

    def _fit(self, states: IntArray, first: int) -> None:
        """Serve jobs in order with what the nodes have."""
        free = states[:, first:]
        left = np.maximum(self.gpus - self.home[:first].sum(axis=0), 0).astype(np.int32)
        if self.needs.shape[1]:
            used = np.einsum("pjn,jr->pnr", states, self.needs)
            scarce = (used > self.stock).any(axis=(1, 2))
            if scarce.any():
                free[scarce] = self._fit_all(free[scarce], first, left)
        running = np.minimum(free.cumsum(axis=1, dtype=np.int32), left)
        running[:, 1:] -= running[:, :-1].copy()
        free[:] = running

    def _fit_all(self, rows: IntArray, first: int, gpus: IntArray) -> IntArray:
        """The same for GPUs and the other resources together."""
        held = np.einsum("jn,jr->nr", self.home[:first], self.needs[:first])
        left = np.broadcast_to(np.maximum(self.stock - held, 0.0), (len(rows), *self.stock.shape)).copy()
        free = np.broadcast_to(gpus, (len(rows), len(gpus))).copy()
        for j in range(rows.shape[1]):
            need = self.needs[first + j]
            take = np.minimum(rows[:, j], free)
            for r in np.flatnonzero(need):
                fitting = np.floor(np.minimum(left[:, :, r] / need[r], float(2**30)) + _SLACK)
                take = np.minimum(take, fitting.astype(np.int32))
            free -= take
            left -= take[:, :, None] * need
            np.maximum(left, 0.0, out=left)
            rows[:, j] = take
        return rows


def _about_one(counts: npt.NDArray[np.integer], where: BoolArray) -> Float32Array:
    """The chance of each of `counts`, so that about one is drawn; 0 elsewhere."""
    return np.where(where, np.float32(1.0) / np.maximum(counts, 1).astype(np.float32), np.float32(0.0))


def non_dominated_ranks(values: FloatArray) -> npt.NDArray[np.int64]:
    """The front of each point [points, 2], 0 the best; both objectives are to be maximised.

    In descending order of the first objective, a front dominates a point if the last one that joined it has
    at least the point's second objective. These decrease from front to front, so bisection finds the first
    front that does not. Equal points share a front.
    """
    ranks = np.empty(len(values), dtype=np.int64)
    order = np.lexsort((-values[:, 1], -values[:, 0]))
    last: list[float] = []
    previous, front = None, 0
    for i, point in zip(order.tolist(), values[order].tolist(), strict=True):
        if point != previous:
            front = bisect_right(last, -point[1])
            last[front : front + 1] = [-point[1]]
            previous = point
        ranks[i] = front
    return ranks


def crowding_distances(values: FloatArray, ranks: npt.NDArray[np.int64]) -> FloatArray:
    """How far a point's neighbours in its front are apart, per objective relative to the front's extent.

    Infinite for the ends of a front; 0 for all but the first of equal points.
    """
    distances = np.zeros(len(values))
    order = np.lexsort((values[:, 1], values[:, 0], ranks))
    keys = np.column_stack((ranks, values))[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    order, keys = order[new], keys[new]
    starts = np.flatnonzero(np.diff(keys[:, 0], prepend=-1.0))
    ends = np.append(starts[1:], len(keys)) - 1
    extent = np.repeat(np.abs(keys[ends, 1:] - keys[starts, 1:]), ends - starts + 1, axis=0)
    gaps = np.zeros((len(keys), 2))
    gaps[1:-1] = np.abs(keys[2:, 1:] - keys[:-2, 1:])
    crowding = np.divide(gaps, extent, out=np.zeros_like(gaps), where=extent > 0).sum(axis=1)
    crowding[starts] = crowding[ends] = np.inf
    distances[order] = crowding
    return distances


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A population with the objectives of its members, shape [population, 2], and their fronts."""

    states: IntArray
    values: FloatArray
    ranks: npt.NDArray[np.int64]
    distances: FloatArray

    @classmethod
    def of(cls, states: IntArray, values: FloatArray) -> Found:
        """Rank a population."""
        ranks = non_dominated_ranks(values)
        return cls(states, values, ranks, crowding_distances(values, ranks))

    @property
    def best(self) -> int:
        """The member with the highest first objective; among equals, by the second."""
        return int(np.lexsort((-self.values[:, 1], -self.values[:, 0]))[0])

    def survivors(self, count: int) -> Found:
        """The `count` best members: by front, then the least crowded."""
        keep = np.lexsort((-self.distances, self.ranks))[:count]
        return Found(self.states[keep], self.values[keep], self.ranks[keep], self.distances[keep])

    def tournament(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Winners of `count` duels between random members: the better front, then the less crowded."""
        size = len(self.states)
        everybody = np.tile(np.arange(size), (-(-2 * count // size), 1))
        one, other = rng.permuted(everybody, axis=1).ravel()[: 2 * count].reshape(2, count)
        ranks, distances = self.ranks, self.distances
        level = ranks[one] == ranks[other]
        loses = (ranks[other] < ranks[one]) | (level & (distances[other] > distances[one]))
        winners: npt.NDArray[np.int64] = np.where(loses, other, one)
        return winners


def search(
    space: Space,
    evaluate: Callable[[IntArray], FloatArray],
    start: IntArray,
    population: int,
    generations: int,
    rng: np.random.Generator,
) -> Found:
    """Breed `generations` times from `start` [members, jobs, nodes]; the best members are never lost."""
    states = _distinct(space.repair(start.copy(), rng), set())
    found = Found.of(states, evaluate(states)).survivors(population)
    for _ in range(generations):
        children = _breed(space, found, population, rng)
        if len(children):
            states = np.concatenate((found.states, children))
            values = np.concatenate((found.values, evaluate(children)))
            found = Found.of(states, values).survivors(population)
    return found


def _breed(space: Space, parents: Found, count: int, rng: np.random.Generator) -> IntArray:
    """Up to `count` children, all different from each other and from their parents' generation."""
    seen = {state.tobytes() for state in parents.states}
    broods: list[IntArray] = []
    missing = count
    for _ in range(_MATING_ATTEMPTS):
        chosen = parents.tournament(2 * -(-missing // 2), rng).reshape(2, -1)
        children = space.crossover(parents.states[chosen], rng)[:missing]
        space.mutate(children, rng)
        broods.append(_distinct(space.repair(children, rng), seen))
        missing -= len(broods[-1])
        if not missing:
            break
    return np.concatenate(broods)


def _distinct(states: IntArray, seen: set[bytes]) -> IntArray:
    """The matrices that are not in `seen`; adds them to it."""
    keep = []
    for i, state in enumerate(states):
        key = state.tobytes()
        if key not in seen:
            seen.add(key)
            keep.append(i)
    return states[keep]
