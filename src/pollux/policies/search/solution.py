"""Counts by a near-exact knapsack, then a placement that keeps unchanged jobs and clears room at the least cost.

For any objective that is a sum with a term for each job; the policy chooses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pollux.core import Allocation, Decision, Placement, Reason, Snapshot
from pollux.policies.packing.empty_cluster import Whole
from pollux.policies.packing.placement_board import PlacementBoard, Shares
from pollux.policies.reasons import Holders, change_code, named
from pollux.policies.search.candidates import FIRST, NOTHING, STAY, Table
from pollux.policies.search.knapsack import IntArray, Options, choose
from pollux.policies.search.objective import Objective

__all__ = ["Solution", "SolverRules", "solve"]

# Other counts are tried when the places cost more than this share above what the counts promised.
_GAP = 0.03
# For how many of its options, the best first, a job may displace others.
_EVICTING = 3


@dataclass(frozen=True, slots=True)
class SolverRules:
    """With `avoid_interference` at most one distributed job uses a node, unless the node isolates traffic.

    `growth_gain` is the least saving, as a share of its cost, for which a running job grows into GPUs that would stay
    idle. Without `fill_idle`, no job grows into GPUs that the counts left idle.
    """

    avoid_interference: bool = True
    growth_gain: float = 0.05
    fill_idle: bool = True


def solve(snapshot: Snapshot, objective: Objective, rules: SolverRules) -> Decision:
    """Choose counts, then places, then use GPUs that are left.

    Where the places cannot hold what the counts promise, counts are chosen again: without the jobs that found
    no place, with jobs moved whose placement packs badly, with all of them moved. The best answer is taken.
    """
    if not snapshot.jobs or not snapshot.cluster.nodes:
        nothing = Whole(snapshot.cluster)
        reasons = {job.id: Reason("fits-nowhere", nothing.lacks(job.limits)) for job in snapshot.jobs}
        return Decision({}, reasons=reasons)
    best = first = Solution(snapshot, objective, rules)
    promise = first.solve()
    for vary in (
        Solution.without_left_out,
        Solution.without_awkward_stays,
        Solution.without_stays,
        Solution.with_all_counts,
    ):
        if best.cost() <= promise + _GAP * abs(promise):
            break
        options = vary(first)
        if options is not None:
            another = Solution(snapshot, objective, rules, first.table, options)
            another.solve()
            best = min(best, another, key=Solution.cost)
    return best.decision()


class Solution:
    """One answer while it is being made: the options that were chosen, and the board they are placed on."""

    def __init__(
        self,
        snapshot: Snapshot,
        objective: Objective,
        rules: SolverRules,
        table: Table | None = None,
        options: Options | None = None,
    ) -> None:
        self.rules, self.snapshot, self.jobs = rules, snapshot, snapshot.jobs
        self.nodes = snapshot.cluster.nodes
        if table is None:
            number = {node.id: n for n, node in enumerate(self.nodes)}
            held: list[Shares] = [
                tuple((number[node], count) for node, count in snapshot.placement(job.id).shares if node in number)
                for job in self.jobs
            ]
            table = Table(snapshot, objective, held)
        self.table, self.held, self.objective = table, table.held, table.objective
        self.options = options or table.options
        self.left_out: list[int] = []
        quotas = {n: q.gpu_quota for n, q in snapshot.queues.items() if q.gpu_quota is not None}
        self.board = PlacementBoard(self.nodes, self.jobs, rules.avoid_interference, quotas)
        self._cost: float | None = None

    def solve(self) -> float:
        """Choose options and turn them into shares on the board; returns the cost of the options."""
        chosen = choose(self.options)
        movers = self._keep(chosen)
        movers.sort(key=lambda j: -self.options.gpus[j, chosen[j]])
        for j in movers:
            self._move(j, int(chosen[j]))
        for j, held in enumerate(self.held):
            if not self.board.shares[j] and not (held and self._restore(j)):
                self._start_small(j)
                if chosen[j] != NOTHING and not self.board.shares[j]:
                    self.left_out.append(j)
        self._use_idle()
        return float(self.options.cost[range(len(chosen)), chosen].sum())

    def cost(self) -> float:
        """The sum that is to be minimised, for the shares on the board."""
        if self._cost is None:
            self._cost = sum(self._cost_of(j, shares) for j, shares in enumerate(self.board.shares))
        return self._cost

    def _cost_of(self, j: int, shares: Shares) -> float:
        if not shares:
            return float(self.table.nothing_cost[j])
        if shares == self.held[j]:
            return float(self.table.stay_cost[j])
        return self.table.cost_on(j, (self.table.type_of[shares[0][0]], len(shares), sum(count for _, count in shares)))

    # Other options, for when places do not hold what counts promise

    def without_left_out(self) -> Options | None:
        """As before, but jobs that found no place hold nothing, or stay."""
        return self.options.closing(self.left_out, range(FIRST, self.options.cost.shape[1]))

    def without_awkward_stays(self) -> Options | None:
        """As before, but no job stays on a number of GPUs that packs badly with others."""
        awkward = [j for j, held in enumerate(self.held) if self._may_leave(j) and not self.table.packs(held)]
        return self.options.closing(awkward, [STAY])

    def without_stays(self) -> Options | None:
        """As before, but every job that may move is placed anew."""
        return self.options.closing([j for j in range(len(self.held)) if self._may_leave(j)], [STAY])

    def with_all_counts(self) -> Options | None:
        """As before, but any number of GPUs within a node may be chosen, whether it packs or not."""
        cost = self.options.cost.copy()
        free = [j for j in range(len(self.jobs)) if not (self.held[j] and self.jobs[j].limits.pinned)]
        cost[free, FIRST:] = self.table.shape_cost[free]
        return replace(self.options, cost=cost)

    def _may_leave(self, j: int) -> bool:
        """Whether a job may be moved and has anything else to choose."""
        return bool(self.held[j]) and not self._anchored(j) and j not in self.table.ending

    # Keeping and moving

    def _keep(self, chosen: IntArray) -> list[int]:
        """Put jobs that stay on the board, immovable ones first; returns those that must move, in order."""
        anchored = self._anchor()
        not_pinned = [j for j in anchored if not self.jobs[j].limits.pinned]
        movers = [j for j in not_pinned if chosen[j] != STAY]
        stuck = {j for j in not_pinned if chosen[j] == STAY and self._is_overfull(self.held[j])}
        for j, option in enumerate(chosen):
            if j in stuck or (j not in anchored and self._has_to_move(j, int(option))):
                movers.append(j)
        return movers

    def _anchor(self) -> dict[int, Shares]:
        """Keep the places of running jobs that may not be stopped, at least until there are better ones."""
        anchored = {j: held for j, held in enumerate(self.held) if held and self._anchored(j)}
        for j, held in anchored.items():
            self.board.put(j, held)
            self.board.move_cost[j] = math.inf
        return anchored

    def _has_to_move(self, j: int, option: int) -> bool:
        """Whether a job is to hold GPUs, but does not stay where it is."""
        return option != NOTHING and not (option == STAY and self._restore(j))

    def _is_overfull(self, shares: Shares) -> bool:
        """Whether a node of the shares has more GPUs taken than it has."""
        return any(self.board.free[n] < 0 for n, _ in shares)

    def _anchored(self, j: int) -> bool:
        return self.jobs[j].limits.pinned or not self.jobs[j].limits.preemptible

    def _move(self, j: int, option: int) -> None:
        """Place a job as chosen; else where it is, or on a smaller shape, whichever costs least.

        Others are moved out of its way only if that costs less than the job would lose otherwise.
        """
        board = self.board
        kept = board.shares[j]
        if kept:
            board.put(j, ())
        candidates = self._candidates(j, option)
        if candidates and option >= FIRST and self._try(j, candidates[0], 0.0):
            return
        alternative, cost = self._without_eviction(j, candidates)
        for candidate in candidates[:_EVICTING]:
            saving = cost - self.options.cost[j, candidate]
            if saving > 0.0 and self._try(j, candidate, saving):
                return
        if alternative == STAY:
            self._restore(j)
        elif alternative >= FIRST:
            self._try(j, alternative, 0.0)
        elif kept:
            board.put(j, kept)

    def _candidates(self, j: int, option: int) -> list[int]:
        """The option and all smaller ones, largest first, those of its own GPU type before others."""
        gpus, pool, costs = self.options.gpus[j], self.options.pool[j], self.options.cost[j]
        most = sum(count for _, count in self.held[j]) if option < FIRST else gpus[option]
        found = [i for i in range(FIRST, len(costs)) if costs[i] < math.inf and gpus[i] <= most]
        return sorted(found, key=lambda i: (i != option, pool[i] != pool[option], -gpus[i]))

    def _try(self, j: int, option: int, budget: float) -> bool:
        t, _, count = self.table.shapes[option - FIRST]
        if count > self.board.quota_left(j):
            return False
        if self.board.place(j, count, self.table.types[t], self.held[j], budget) is None:
            return False
        self.board.move_cost[j] = 0.0
        return True

    def _without_eviction(self, j: int, candidates: list[int]) -> tuple[int, float]:
        """The best that a job can have without moving others, and its cost."""
        board, table = self.board, self.table
        best, cost = NOTHING, float(table.nothing_cost[j])
        if self._can_restore(j):
            best, cost = STAY, float(table.stay_cost[j])
        for candidate in candidates:
            if self.options.cost[j, candidate] < cost:
                mark = board.mark()
                if self._try(j, candidate, 0.0):
                    board.undo(mark)
                    return candidate, float(self.options.cost[j, candidate])
        return best, cost

    def _can_restore(self, j: int) -> bool:
        held = self.held[j]
        if not held or not self.table.may_stay(j) or not self.board.usable(j, held):
            return False
        return sum(count for _, count in held) <= self.board.quota_left(j)

    def _restore(self, j: int) -> bool:
        """Let a job stay where it is, if it can."""
        if not self._can_restore(j):
            return False
        self.board.put(j, self.held[j])
        cost = max(self.table.moved_cost[j] - self.table.stay_cost[j], 0.0)
        self.board.move_cost[j] = math.inf if j in self.table.ending else cost
        return True

    def _start_small(self, j: int) -> None:
        """Give a job that waits its minimum, wherever GPUs are idle."""
        limits = self.jobs[j].limits
        if limits.min_gpus > self.board.quota_left(j):
            return
        for gpu_type in self.table.types:
            if limits.takes_type(gpu_type) and self.board.scatter(j, limits.min_gpus, gpu_type):
                return

    # What is left over

    def _use_idle(self) -> None:
        """Grow jobs into GPUs that would stay idle on their node, the largest saving per GPU first."""
        for n, node in enumerate(self.nodes if self.rules.fill_idle else ()):
            while node.schedulable and self.board.free[n] > 0:
                offers = [offer for j in self.board.residents[n] for offer in self._growth(j, n)]
                if not offers:
                    break
                _, j, count = min(offers)
                self.board.put(j, ((n, count),))

    def _growth(self, j: int, n: int) -> list[tuple[float, int, int]]:
        """Ways to grow a job on its one node: (-saving per GPU, job, new count)."""
        shares = self.board.shares[j]
        if len(shares) != 1 or self.board.move_cost[j] == math.inf:
            return []
        have = shares[0][1]
        t = self.table.type_of[n]
        stays = shares == self.held[j]
        cost = self.table.stay_cost[j] if stays else self._shape_cost(j, t, have)
        threshold = self.rules.growth_gain * abs(cost) if stays else 0.0
        most = min(have + self.board.free[n], self.board.quota_left(j))
        offers = []
        for count in range(have + 1, int(most) + 1):
            saving = cost - self._shape_cost(j, t, count)
            if saving > threshold and self.board.fits(j, n, count - have):
                offers.append((-saving / (count - have), j, count))
        return offers

    def _shape_cost(self, j: int, t: int, count: int) -> float:
        column = self.table.column.get((t, count))
        return math.inf if column is None else float(self.table.shape_cost[j, column - FIRST])

    # The answer

    def decision(self) -> Decision:
        """The placements of the jobs, and the reasons."""
        allocation: dict[str, Placement] = {}
        changed: list[int] = []
        for j, job in enumerate(self.jobs):
            shares = self.board.shares[j]
            if shares and shares == self.held[j]:
                allocation[job.id] = self.snapshot.placement(job.id)
                continue
            changed.append(j)
            if shares:
                allocation[job.id] = Placement(tuple((self.nodes[n].id, count) for n, count in shares))
        return Decision(allocation, reasons=_Why(self, allocation).reasons(changed) if changed else {})


class _Why:
    """The reasons of a solution: its own numbers, and the jobs that gained or hold GPUs."""

    def __init__(self, solution: Solution, allocation: Allocation) -> None:
        self.board, self.held, self.table = solution.board, solution.held, solution.table
        self.jobs, self.snapshot = solution.jobs, solution.snapshot
        self.before = [_gpus(held) for held in self.held]
        self.after = [_gpus(shares) for shares in self.board.shares]
        self.free = float(sum(max(n, 0) for n in self.board.free))
        self.holders = Holders(self.snapshot, allocation)
        self.whole = Whole(self.snapshot.cluster)
        gains = [(after - before, j) for j, (before, after) in enumerate(zip(self.before, self.after, strict=True))]
        self.winner = max(gains, key=lambda gain: (gain[0], -gain[1]))[1]
        self.gainers = named((gain, self.jobs[j].id) for gain, j in gains if gain > 0)

    def reasons(self, changed: Iterable[int]) -> dict[str, Reason]:
        """The reasons of these jobs, which change or wait."""
        return {self.jobs[j].id: self._reason(j) for j in changed}

    def _reason(self, j: int) -> Reason:
        before, after = self.before[j], self.after[j]
        code, numbers = change_code(before, after), self._numbers(j)
        if after < before:
            if self.gainers:
                numbers |= self._of_winner()
            return Reason(code, numbers, self.gainers)
        if after:
            return Reason(code, numbers)
        lacks = self.whole.lacks(self.jobs[j].limits, self.snapshot.queues.get(self.jobs[j].queue))
        if lacks and not before:
            return Reason("fits-nowhere", lacks)
        return self.holders.blamed(self.jobs[j], Reason(self._waits_for(j, numbers), numbers))

    def _of_winner(self) -> dict[str, float]:
        """The numbers of the job that gained most."""
        w, others = self.winner, self.table.objective.numbers(self.winner)
        numbers = {
            "other_gpus_before": float(self.before[w]),
            "other_gpus_after": float(self.after[w]),
            "other_speedup_before": float(self.table.stay_speedups[w]),
            "other_speedup_after": self._speedup_after(w),
        }
        numbers |= {f"other_{name}": others[name] for name in ("left_seconds", "lateness") if name in others}
        if self.jobs[w].goodput is None:
            numbers["other_speedup_assumed"] = 1.0
        return numbers

    def _waits_for(self, j: int, numbers: dict[str, float]) -> str:
        """What a job that held nothing lacks."""
        limits, quota = self.jobs[j].limits, self.board.quota_left(j)
        numbers |= {"gpus": float(limits.min_gpus), "free_gpus": self.free}
        if limits.min_gpus > quota:
            numbers["quota_left"] = float(max(quota, 0))
            return "waits-for-quota"
        return "waits-for-gpus" if limits.min_gpus > self.free else "no-room"

    def _numbers(self, j: int) -> dict[str, float]:
        numbers = {
            "gpus_before": float(self.before[j]),
            "gpus_after": float(self.after[j]),
            "fair_gpus": float(self.table.objective.fair_gpus),
            "speedup_before": float(self.table.stay_speedups[j]),
            "min_gpus": float(self.jobs[j].limits.min_gpus),
            "max_gpus": float(self.jobs[j].limits.max_gpus),
        }
        if self.after[j]:
            numbers["speedup_after"] = self._speedup_after(j)
        if self.before[j] and self.after[j] and self.jobs[j].goodput is None:
            numbers["speedup_assumed"] = 1.0
        if self.before[j] or self.after[j]:
            numbers["restart_factor"] = float(self.table.factors[j])
        return {**numbers, **self.table.objective.numbers(j)}

    def _speedup_after(self, j: int) -> float:
        shares = self.board.shares[j]
        t, nodes, gpus = self.table.type_of[shares[0][0]], len(shares), self.after[j]
        column = self.table.column.get((t, gpus))
        if column is not None:
            return float(self.table.speedups[j, column - FIRST])
        return float(self.table.objective.speedups([nodes], [gpus], self.table.types[t])[j, 0])


def _gpus(shares: Shares) -> int:
    return sum(count for _, count in shares)
