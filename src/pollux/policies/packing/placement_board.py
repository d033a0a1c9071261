"""Where jobs are: nodes, the jobs on them, and finding or clearing room at the least cost.

Jobs and nodes are numbers here. Every change is journalled, so that an attempt that fails can be taken back.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from pollux.core import JobView, Node

__all__ = ["PlacementBoard", "Shares"]

Shares = tuple[tuple[int, int], ...]
"""(node, GPUs) pairs of one job."""

# How many nodes are searched, and how many offers compared, to clear one; how many levels deep jobs that leave may
# displace smaller ones. Counts, not seconds, so that decisions do not depend on the machine.
_SCANS = 256
_CANDIDATES = 24
_DEPTH = 4
_SLACK = 1e-9

_WholeNode = tuple[float, bool, int, int, list[int]]
"""A node that a job can have whole: (cost of emptying it, not its own, -size, number, jobs that leave)."""


def _by_size(nodes: Sequence[Node]) -> dict[str, list[list[int]]]:
    """Open nodes of each type by their GPUs, each list in order of node number."""
    found: dict[str, list[list[int]]] = {}
    for n, node in enumerate(nodes):
        if node.schedulable:
            levels = found.setdefault(node.gpu_type, [])
            levels.extend([] for _ in range(node.num_gpus + 1 - len(levels)))
            levels[node.num_gpus].append(n)
    return found


def _count_idle(levels: list[list[int]]) -> int:
    """Free GPUs of all nodes; `levels` lists nodes by their number of free GPUs."""
    return sum(k * len(level) for k, level in enumerate(levels))


class PlacementBoard:
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
        self._by_free = _by_size(nodes)
        self._idle = {gpu_type: _count_idle(levels) for gpu_type, levels in self._by_free.items()}
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
            self._shift(n, -sign * count)
            if sign > 0:
                self.residents[n][job] = count
            else:
                del self.residents[n][job]
            if spread:
                self._network_users[n] += sign
            if self._counted:
                self._cpus[n] -= sign * count * limits.cpus_per_gpu
                self._memory[n] -= sign * count * limits.memory_bytes_per_gpu

    def _shift(self, n: int, change: int) -> None:
        """Count GPUs of a node as free, or as taken; an overfull node has no free ones."""
        node, before = self.nodes[n], self.free[n]
        after = self.free[n] = before + change
        if not node.schedulable:
            return
        levels = self._by_free[node.gpu_type]
        self._idle[node.gpu_type] += max(after, 0) - max(before, 0)
        if before >= 0:
            level = levels[before]
            del level[bisect_left(level, n)]
        if after >= 0:
            insort(levels[after], n)

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

    def _down_from(self, gpu_type: str, most: int) -> Iterator[int]:
        """Open nodes of a type with at most `most` free GPUs, the emptiest first, at most `_SCANS` of them."""
        levels = self._by_free.get(gpu_type, [])
        scanned = 0
        for level in range(min(most, len(levels) - 1), -1, -1):
            for n in levels[level]:
                if scanned == _SCANS:
                    return
                scanned += 1
                yield n

    # Finding and clearing room

    def place(self, job: int, count: int, gpu_type: str, prefer: Shares, budget: float) -> float | None:
        """Put the job on `count` GPUs of a type; the cost of jobs that had to move, or `None` if it cannot be done.

        On as few nodes as possible, its own (`prefer`) first, then where it leaves the least unused. Other jobs
        are moved out of the way only while that costs less than `budget`.
        """
        return self._place(job, count, gpu_type, prefer, budget, _DEPTH)

    def _place(self, job: int, count: int, gpu_type: str, prefer: Shares, budget: float, depth: int) -> float | None:
        levels = self._by_free.get(gpu_type, ())
        if count >= len(levels):
            return self._place_wide(job, count, gpu_type, prefer, budget, depth)
        n = self._find(job, count, gpu_type, prefer)
        if n is not None:
            self.put(job, ((n, count),))
            return 0.0
        return self._clear_one(job, count, gpu_type, budget, depth) if depth and budget > 0.0 else None

    def _find(self, job: int, count: int, gpu_type: str, prefer: Shares) -> int | None:
        for n, _ in prefer:
            node = self.nodes[n]
            if node.gpu_type == gpu_type and node.schedulable and self.fits(job, n, count):
                return n
        for level in self._by_free[gpu_type][count:]:
            if level and not self._counted:
                return level[0]
            found = next((n for n in level if self.fits(job, n, count)), None)
            if found is not None:
                return found
        return None

    def _clear_one(self, job: int, count: int, gpu_type: str, budget: float, depth: int) -> float | None:
        """Make room for `count` GPUs on one node by moving smaller jobs off it."""
        offers: list[tuple[float, int, list[int]]] = []
        for n in self._down_from(gpu_type, count - 1):
            if self.nodes[n].num_gpus >= count:
                leavers = self._leavers(n, count - self.free[n], count)
                if leavers is not None:
                    cost = sum(self.move_cost[j] for j in leavers)
                    if cost < budget:
                        offers.append((cost, n, leavers))
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
            if self.move_cost[j] < math.inf and (held < below or len(self.shares[j]) > 1)
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
        """Use whole nodes and part of one more; its own nodes, and those that cost least to empty, come first."""
        offers = self._whole_nodes(count, gpu_type, prefer, depth if budget > 0.0 else 0)
        shares, leavers, cost = self._cheapest(offers, count)
        if cost > 0.0 and cost >= budget:
            return None
        left = count - sum(size for _, size in shares)
        if left:
            spare = self._spare(job, left, gpu_type, {n for n, _ in shares})
            if spare is None:
                return None
            shares.append((spare, left))
        limit = self.jobs[job].limits.max_nodes
        if limit is not None and len(shares) > limit:
            return None
        return self._swap(job, tuple(sorted(shares)), leavers, gpu_type, cost, budget, depth)

    def _whole_nodes(self, count: int, gpu_type: str, prefer: Shares, depth: int) -> list[_WholeNode]:
        """Nodes that the job can have whole."""
        own = {n for n, _ in prefer if self.nodes[n].schedulable and self.nodes[n].gpu_type == gpu_type}
        offers: list[_WholeNode] = [
            (0.0, n not in own, -self.nodes[n].num_gpus, n, []) for n in self._empty_nodes(count, gpu_type, own)
        ]
        if -sum(offer[2] for offer in offers) < count and depth:
            self._offer_occupied(offers, count + _CANDIDATES, gpu_type, own)
        return offers

    def _cheapest(self, offers: list[_WholeNode], count: int) -> tuple[list[tuple[int, int]], list[int], float]:
        """Shares of whole nodes for at most `count` GPUs, the jobs that leave, and the cost."""
        shares: list[tuple[int, int]] = []
        leavers: list[int] = []
        cost, left = 0.0, count
        for each, _, _, n, some in sorted(offers, key=lambda offer: offer[:4]):
            size = self.nodes[n].num_gpus
            if size <= left:
                shares.append((n, size))
                leavers += some
                cost += each
                left -= size
            if not left:
                break
        return shares, leavers, cost

    def _empty_nodes(self, count: int, gpu_type: str, own: set[int]) -> list[int]:
        """Nodes that are empty, the job's own first, then the largest, as many as could be needed."""
        candidates = [n for n in own if self.free[n] == self.nodes[n].num_gpus]
        for level in reversed(self._by_free.get(gpu_type, [])):
            candidates += level[: count + len(own)]
        return [n for n in dict.fromkeys(candidates) if self._is_empty(n)]

    def _offer_occupied(self, offers: list[_WholeNode], most: int, gpu_type: str, own: set[int]) -> None:
        """Add nodes that could be emptied, until there are `most` offers."""
        largest = len(self._by_free[gpu_type]) - 1
        for n in self._down_from(gpu_type, largest):
            size = self.nodes[n].num_gpus
            if self.free[n] < size and not self._crowded(n):
                leavers = self._leavers(n, size - self.free[n], size)
                if leavers is not None:
                    offers.append((sum(self.move_cost[j] for j in leavers), n not in own, -size, n, leavers))
            if len(offers) >= most:
                break

    def _is_empty(self, n: int) -> bool:
        """Whether a node has GPUs, all of them free, and a distributed job may join it."""
        return self.free[n] == self.nodes[n].num_gpus > 0 and not self._crowded(n)

    def _spare(self, job: int, count: int, gpu_type: str, taken: set[int]) -> int | None:
        """The tightest other node on which a distributed job can have `count` GPUs."""
        for level in self._by_free[gpu_type][count:]:
            for n in level:
                if n not in taken and not self._crowded(n) and self.fits(job, n, count):
                    return n
        return None

    def scatter(self, job: int, count: int, gpu_type: str) -> bool:
        """Put the job on `count` GPUs wherever they are idle: on one node if it can be, else on as few as possible."""
        if self._idle.get(gpu_type, 0) < count:
            return False
        if count < len(self._by_free[gpu_type]) and self._place(job, count, gpu_type, (), 0.0, 0) is not None:
            return True
        shares, left = self._idle_shares(job, count, gpu_type)
        limit = self.jobs[job].limits.max_nodes
        if left or (limit is not None and len(shares) > limit):
            return False
        self.put(job, tuple(sorted(shares)))
        return True

    def _idle_shares(self, job: int, count: int, gpu_type: str) -> tuple[list[tuple[int, int]], int]:
        """Idle GPUs for the job, from nodes with most of them, and how many of `count` are missing."""
        shares: list[tuple[int, int]] = []
        left = count
        for n in chain.from_iterable(reversed(self._by_free[gpu_type][1:])):
            room = min(self.room_on(job, n), left)
            if room and not self._crowded(n):
                shares.append((n, room))
                left -= room
            if not left:
                break
        return shares, left
