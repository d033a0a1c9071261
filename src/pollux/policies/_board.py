"""Where jobs sit: nodes, who is on them, and finding or clearing room at the least cost.

Jobs and nodes are numbers here. Every change is journalled, so that an attempt that fails can be taken back.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from pollux.core import JobView, Node

__all__ = ["Board", "Shares"]

Shares = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs of one job."""

# How many nodes are looked at when one must be cleared, and how deep evicted jobs may evict smaller ones.
_CANDIDATES = 24
_DEPTH = 4
_SLACK = 1e-9


class Board:
    """The state of all nodes while placements are being made.

    `move_cost[j]` is what it costs the objective to move job j, `inf` if it may not be moved.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        jobs: Sequence[JobView],
        avoid_interference: bool,
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.nodes = nodes
        self.jobs = jobs
        self.free = [node.num_gpus for node in nodes]
        self.shares: list[Shares] = [()] * len(jobs)
        self.move_cost = [0.0] * len(jobs)
        self.residents: list[dict[int, int]] = [{} for _ in nodes]
        self._network_users = [0] * len(nodes)
        self._avoid = [avoid_interference and not node.isolated_network for node in nodes]
        self._counted = any(job.limits.cpus_per_gpu or job.limits.memory_bytes_per_gpu for job in jobs)
        self._cpus = [node.num_cpus for node in nodes]
        self._memory = [node.memory_bytes for node in nodes]
        self._by_free: dict[str, list[list[int]]] = {}
        for n, node in enumerate(nodes):
            if node.schedulable:
                levels = self._by_free.setdefault(node.gpu_type, [])
                levels.extend([] for _ in range(node.num_gpus + 1 - len(levels)))
                levels[node.num_gpus].append(n)
        self._quotas = dict(quotas or {})
        self._journal: list[tuple[int, Shares]] = []

    # Changing the board

    def put(self, job: int, shares: Shares) -> None:
        """Move a job to exactly these shares (`()` takes it off)."""
        self._journal.append((job, self.shares[job]))
        self._set(job, shares)

    def mark(self) -> int:
        """A point to which `undo` can return."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Take back everything since `mark`."""
        while len(self._journal) > mark:
            self._set(*self._journal.pop())

    def _set(self, job: int, shares: Shares) -> None:
        self._count(job, self.shares[job], -1)
        self._count(job, shares, 1)
        self.shares[job] = shares

    def _count(self, job: int, shares: Shares, sign: int) -> None:
        spread = len(shares) > 1
        limits, queue = self.jobs[job].limits, self.jobs[job].queue
        if queue in self._quotas:
            self._quotas[queue] -= sign * sum(count for _, count in shares)
        for n, count in shares:
            self.free[n] -= sign * count
            node = self.nodes[n]
            if node.schedulable and self.free[n] >= 0:
                heapq.heappush(self._by_free[node.gpu_type][self.free[n]], n)
            if sign > 0:
                self.residents[n][job] = count
            else:
                del self.residents[n][job]
            if spread:
                self._network_users[n] += sign
            if self._counted:
                self._cpus[n] -= sign * count * limits.cpus_per_gpu
                self._memory[n] -= sign * count * limits.memory_bytes_per_gpu

    # Looking at the board

    def fits(self, job: int, n: int, count: int) -> bool:
        """Whether `count` GPUs of node n are free for the job, with the CPUs and memory that go with them."""
        if self.free[n] < count:
            return False
        if not self._counted:
            return True
        limits = self.jobs[job].limits
        return (
            self._cpus[n] + _SLACK >= count * limits.cpus_per_gpu
            and self._memory[n] + _SLACK >= count * limits.memory_bytes_per_gpu
        )

    def quota_left(self, job: int) -> float:
        """GPUs that the job may hold under its queue's quota, what it holds now included."""
        left = self._quotas.get(self.jobs[job].queue)
        return math.inf if left is None else left + sum(count for _, count in self.shares[job])

    def room_on(self, job: int, n: int) -> int:
        """The most GPUs of node n that the job could take now."""
        count = self.free[n]
        while count > 0 and not self.fits(job, n, count):
            count -= 1
        return count

    def usable(self, job: int, shares: Shares) -> bool:
        """Whether the job could be put on exactly these shares now."""
        if len(shares) > 1 and any(self._crowded(n) for n, _ in shares):
            return False
        return all(self.fits(job, n, count) for n, count in shares)

    def _crowded(self, n: int) -> bool:
        """Whether another distributed job may not join this node."""
        return self._avoid[n] and self._network_users[n] > 0

    def with_free(self, gpu_type: str, least: int, most: int | None = None) -> Iterable[int]:
        """Open nodes of a type by free GPUs ascending from `least`, lowest number first."""
        levels = self._by_free.get(gpu_type, [])
        for level in range(max(least, 0), len(levels) if most is None else min(most + 1, len(levels))):
            yield from self._level(levels, level)

    def _level(self, levels: list[list[int]], level: int) -> list[int]:
        """Nodes that have exactly `level` free GPUs; entries that went stale are dropped on the way."""
        heap = levels[level]
        valid = sorted({n for n in heap if self.free[n] == level})
        levels[level] = valid[:]
        return valid

    # Finding and clearing room

    def place(self, job: int, count: int, gpu_type: str, prefer: Shares, budget: float) -> float | None:
        """Put the job on `count` GPUs of a type; the cost of jobs that had to move, or `None` if it cannot be done.

        On as few nodes as possible, its own (`prefer`) first, then where it leaves the least unused. Other jobs
        are moved out of the way only while that costs less than `budget`.
        """
        return self._place(job, count, gpu_type, prefer, budget, _DEPTH)

    def _place(self, job: int, count: int, gpu_type: str, prefer: Shares, budget: float, depth: int) -> float | None:
        largest = len(self._by_free.get(gpu_type, ())) - 1
        if count <= largest:
            n = self._find(job, count, gpu_type, prefer)
            if n is not None:
                self.put(job, ((n, count),))
                return 0.0
            return self._clear_one(job, count, gpu_type, budget, depth) if depth else None
        return self._place_wide(job, count, gpu_type, prefer, budget, depth)

    def _find(self, job: int, count: int, gpu_type: str, prefer: Shares) -> int | None:
        for n, _ in prefer:
            node = self.nodes[n]
            if node.gpu_type == gpu_type and node.schedulable and self.fits(job, n, count):
                return n
        levels = self._by_free[gpu_type]
        for level in range(count, len(levels)):
            heap = levels[level]
            while heap:
                n = heap[0]
                if self.free[n] != level:
                    heapq.heappop(heap)
                    continue
                if not self._counted or self.fits(job, n, count):
                    return n
                found = next((n for n in self._level(levels, level) if self.fits(job, n, count)), None)
                if found is not None:
                    return found
                break
        return None

    def _clear_one(self, job: int, count: int, gpu_type: str, budget: float, depth: int) -> float | None:
        """Make room for `count` GPUs on one node by moving smaller jobs off it."""
        offers: list[tuple[float, int, list[int]]] = []
        for level in range(count - 1, -1, -1):
            for n in self.with_free(gpu_type, level, level):
                if self.nodes[n].num_gpus >= count:
                    leavers = self._leavers(n, count - self.free[n], count)
                    if leavers is not None:
                        cost = sum(self.move_cost[j] for j in leavers)
                        if cost < budget:
                            offers.append((cost, n, leavers))
                if len(offers) >= _CANDIDATES:
                    break
            if len(offers) >= _CANDIDATES:
                break
        offers.sort(key=lambda offer: offer[:2])
        for cost, n, leavers in offers[:3]:
            total = self._swap(job, ((n, count),), leavers, gpu_type, cost, budget, depth)
            if total is not None:
                return total
        return None

    def _leavers(self, n: int, needed: int, below: int) -> list[int] | None:
        """The cheapest jobs smaller than `below` whose leaving frees `needed` GPUs of node n."""
        movable = [
            (self.move_cost[j], -held, j)
            for j, held in self.residents[n].items()
            if held < below and len(self.shares[j]) == 1 and self.move_cost[j] < math.inf
        ]
        movable.sort()
        chosen: list[tuple[float, int, int]] = []
        for entry in movable:
            if needed <= 0:
                break
            chosen.append(entry)
            needed += entry[1]
        if needed > 0:
            return None
        for entry in sorted(chosen, key=lambda entry: (-entry[0], entry[1])):
            if needed - entry[1] <= 0 and len(chosen) > 1:
                chosen.remove(entry)
                needed -= entry[1]
        return [j for _, _, j in chosen]

    def _swap(
        self, job: int, shares: Shares, leavers: list[int], gpu_type: str, cost: float, budget: float, depth: int
    ) -> float | None:
        """Take `leavers` off, put the job on `shares`, find the leavers other places; all or nothing."""
        mark = self.mark()
        sizes = [(sum(count for _, count in self.shares[j]), j) for j in leavers]
        for _, j in sizes:
            self.put(j, ())
        if not self.usable(job, shares):
            self.undo(mark)
            return None
        self.put(job, shares)
        for size, j in sorted(sizes, reverse=True):
            extra = self._place(j, size, gpu_type, (), budget - cost, depth - 1)
            if extra is None:
                self.undo(mark)
                return None
            cost += extra
        return cost

    def _place_wide(
        self, job: int, count: int, gpu_type: str, prefer: Shares, budget: float, depth: int
    ) -> float | None:
        """Whole nodes, and a rest on one more node; nodes that cost least to empty are taken first."""
        largest = len(self._by_free.get(gpu_type, ())) - 1
        if largest < 1:
            return None
        whole, rest = divmod(count, largest)
        own = {n for n, _ in prefer}
        offers: list[tuple[float, bool, int, list[int]]] = []
        for level in range(largest, -1, -1):
            for n in self.with_free(gpu_type, level, level):
                if self.nodes[n].num_gpus != largest or self._crowded(n):
                    continue
                leavers = self._leavers(n, largest - level, largest) if level < largest else []
                if leavers is not None:
                    offers.append((sum(self.move_cost[j] for j in leavers), n not in own, n, leavers))
            enough = len(offers) >= whole and (level == largest or len(offers) >= whole + _CANDIDATES)
            if enough or not depth:
                break
        offers.sort(key=lambda offer: offer[:3])
        if len(offers) < whole:
            return None
        picked = offers[:whole]
        cost = sum(offer[0] for offer in picked)
        if cost > 0 and cost >= budget:
            return None
        shares = [(n, largest) for _, _, n, _ in picked]
        if rest:
            taken = {n for n, _ in shares}
            spare = next((n for n in self.with_free(gpu_type, rest) if n not in taken and not self._crowded(n)), None)
            if spare is None:
                return None
            shares.append((spare, rest))
        leavers = [j for _, _, _, some in picked for j in some]
        return self._swap(job, tuple(sorted(shares)), leavers, gpu_type, cost, budget, depth)

    def scatter(self, job: int, count: int, gpu_type: str) -> bool:
        """Put the job on `count` GPUs wherever they are idle: on one node if it can be, else on as few as possible."""
        room = sorted(
            ((-self.room_on(job, n), n) for n in self.with_free(gpu_type, 1)),
        )
        if room and -room[0][0] >= count:
            return self._place(job, count, gpu_type, (), 0.0, 0) is not None
        shares: list[tuple[int, int]] = []
        left = count
        for negative, n in room:
            if self._crowded(n):
                continue
            shares.append((n, min(left, -negative)))
            left -= shares[-1][1]
            if left == 0:
                break
        limit = self.jobs[job].limits.max_nodes
        if left or (limit is not None and len(shares) > limit):
            return False
        self.put(job, tuple(sorted(shares)))
        return True
