"""Pollux (Qiao et al., OSDI'21): goodput with fairness, found by a solver of our own.

Counts by a near-exact knapsack, then a placement that keeps unchanged jobs and clears room at the least cost.
"""

from __future__ import annotations

import math

from pollux.core import BatchMode, Decision, InvalidInput, Placement, Reason, Snapshot
from pollux.policies._board import Board, Shares
from pollux.policies._counts import IntArray, choose
from pollux.policies._objective import Objective
from pollux.policies._options import FIRST, NOTHING, STAY, Table

__all__ = ["Pollux"]

# Jobs that find no place are rare; after two more tries the answer is good enough.
_RETRIES = 2


class Pollux:
    """Maximise the power mean of restart-weighted speed-ups; `_objective` has the formulas.

    `fairness` is p: 1 for none, -1 as published, -10 for strict. A job at most doubles the largest number of
    GPUs it has run with. With `avoid_interference` at most one distributed job uses a node, unless the node
    isolates traffic. `growth_gain` is the share of its cost that a running job must save to be resized only
    because GPUs would stay idle otherwise.
    """

    name = "pollux"
    needs: frozenset[str] = frozenset({"goodput"})
    batch: BatchMode = "adaptive"

    # By the published formula a job of age 0 has ρ = 0: whether it starts would not matter to the objective.
    # This little is enough to start it, and leaves the objective of all others as published.
    start_floor = 0.02

    def __init__(self, fairness: float = -1.0, avoid_interference: bool = True, growth_gain: float = 0.05) -> None:
        if not math.isfinite(fairness):
            raise InvalidInput(f"fairness is {fairness}; give a finite power, -1 is the published one")
        self.fairness = fairness
        self.avoid_interference = avoid_interference
        self.growth_gain = growth_gain

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Counts, then places, then what is left over.

        Where jobs find no place for what they were to have, the counts are chosen again without them, and the
        better of the two answers is taken.
        """
        if not snapshot.jobs or not snapshot.cluster.nodes:
            return Decision({})
        best = _Solution(self, snapshot)
        left_out = best.solve()
        for _ in range(_RETRIES):
            if not left_out:
                break
            again = _Solution(self, snapshot, best.table)
            again.table.options.cost[left_out, FIRST:] = math.inf
            left_out = again.solve()
            if again.cost() < best.cost():
                best = again
        return best.decision()


class _Solution:
    def __init__(self, policy: Pollux, snapshot: Snapshot, table: Table | None = None) -> None:
        self.policy, self.snapshot, self.jobs = policy, snapshot, snapshot.jobs
        self.nodes = snapshot.cluster.nodes
        if table is None:
            number = {node.id: n for n, node in enumerate(self.nodes)}
            held: list[Shares] = [
                tuple((number[node], count) for node, count in snapshot.placement(job.id).shares if node in number)
                for job in self.jobs
            ]
            objective = Objective(snapshot, self.jobs, policy.fairness, policy.start_floor)
            table = Table(snapshot, objective, held)
        self.table, self.held, self.objective = table, table.held, table.objective
        quotas = {n: q.gpu_quota for n, q in snapshot.queues.items() if q.gpu_quota is not None}
        self.board = Board(self.nodes, self.jobs, policy.avoid_interference, quotas)

    def solve(self) -> list[int]:
        """Choose options and turn them into shares on the board; jobs that were to run and found no place."""
        chosen = choose(self.table.options)
        movers = self._keep(chosen)
        movers.sort(key=lambda j: -self.table.options.gpus[j, chosen[j]])
        for j in movers:
            self._move(j, int(chosen[j]))
        left_out = []
        for j, held in enumerate(self.held):
            if not self.board.shares[j] and not (held and self._restore(j)):
                self._start_small(j)
                if chosen[j] != NOTHING and not self.board.shares[j]:
                    left_out.append(j)
        self._use_idle()
        return left_out

    def cost(self) -> float:
        """What the shares on the board add up to in the sum that is to be minimised."""
        total = 0.0
        for j, shares in enumerate(self.board.shares):
            if not shares:
                total += self.table.nothing_cost[j]
            elif shares == self.held[j]:
                total += self.table.stay_cost[j]
            else:
                total += self._shape_cost(j, self.table.type_of[shares[0][0]], sum(count for _, count in shares))
        return total

    # Keeping and moving

    def _keep(self, chosen: IntArray) -> list[int]:
        """Put everybody who stays on the board, immovable jobs first; the others, in order, have to move."""
        board, movers = self.board, []
        anchored = [bool(held) and self._anchored(j) for j, held in enumerate(self.held)]
        for j, job in enumerate(self.jobs):
            if anchored[j]:
                # It must end up somewhere: its place is kept, at least until there is a better one.
                board.put(j, self.held[j])
                board.move_cost[j] = math.inf
                if not job.limits.pinned and chosen[j] != STAY:
                    movers.append(j)
        overfull = {n for n, free in enumerate(board.free) if free < 0}
        for j, job in enumerate(self.jobs):
            if anchored[j]:
                if chosen[j] == STAY and not job.limits.pinned and any(n in overfull for n, _ in self.held[j]):
                    movers.append(j)
            elif chosen[j] == STAY and self._restore(j):
                continue
            elif chosen[j] != NOTHING:
                movers.append(j)
        return movers

    def _anchored(self, j: int) -> bool:
        return self.jobs[j].limits.pinned or not self.jobs[j].limits.preemptible

    def _move(self, j: int, option: int) -> None:
        """Place a job as chosen; else where it is; else on the next smaller shape that can be had."""
        board, table, costs = self.board, self.table, self.table.options.cost[j]
        kept = board.shares[j]
        if kept:
            board.put(j, ())
        if option < FIRST:
            option = max((i for i in range(FIRST, len(costs)) if costs[i] < math.inf), default=NOTHING)
        while option >= FIRST:
            t, _, count = table.shapes[option - FIRST]
            if costs[option] < math.inf and count <= board.quota_left(j):
                stays = table.may_stay(j) and board.usable(j, self.held[j])
                worst = table.stay_cost[j] if stays else table.nothing_cost[j]
                if board.place(j, count, table.types[t], self.held[j], worst - costs[option]) is not None:
                    board.move_cost[j] = 0.0
                    return
            if self._restore(j):
                return
            option -= 1
        if kept:
            board.put(j, kept)

    def _restore(self, j: int) -> bool:
        """Let a job stay where it is after all."""
        held = self.held[j]
        if not held or not self.table.may_stay(j) or not self.board.usable(j, held):
            return False
        if sum(count for _, count in held) > self.board.quota_left(j):
            return False
        self.board.put(j, held)
        self.board.move_cost[j] = max(self.table.moved_cost[j] - self.table.stay_cost[j], 0.0)
        return True

    def _start_small(self, j: int) -> None:
        """Give a job that waits its minimum, wherever GPUs are idle."""
        limits = self.jobs[j].limits
        if limits.min_gpus > self.board.quota_left(j):
            return
        for gpu_type in self.table.types:
            allowed = not limits.gpu_types or gpu_type in limits.gpu_types
            if allowed and self.board.scatter(j, limits.min_gpus, gpu_type):
                return

    # What is left over

    def _use_idle(self) -> None:
        """Grow jobs into GPUs that would stay idle on their node, the largest saving per GPU first."""
        for n, node in enumerate(self.nodes):
            while node.schedulable and self.board.free[n] > 0:
                offers = [offer for j in self.board.residents[n] for offer in self._growth(j, n)]
                if not offers:
                    break
                _, _, j, count = min(offers)
                self.board.put(j, ((n, count),))

    def _growth(self, j: int, n: int) -> list[tuple[float, int, int, int]]:
        """Ways to grow a job on its one node: (-saving per GPU, job, job, new count)."""
        shares = self.board.shares[j]
        if len(shares) != 1 or self.board.move_cost[j] == math.inf:
            return []
        have = shares[0][1]
        t = self.table.type_of[n]
        stays = shares == self.held[j]
        cost = self.table.stay_cost[j] if stays else self._shape_cost(j, t, have)
        threshold = self.policy.growth_gain * abs(cost) if stays else 0.0
        most = min(have + self.board.free[n], self.board.quota_left(j))
        offers = []
        for count in range(have + 1, int(most) + 1):
            saving = cost - self._shape_cost(j, t, count)
            if saving > threshold and self.board.fits(j, n, count - have):
                offers.append((-saving / (count - have), j, j, count))
        return offers

    def _shape_cost(self, j: int, t: int, count: int) -> float:
        column = self.table.column.get((t, count))
        return math.inf if column is None else float(self.table.shape_cost[j, column - FIRST])

    # The answer

    def decision(self) -> Decision:
        """Shares by name, and why."""
        allocation: dict[str, Placement] = {}
        reasons: dict[str, Reason] = {}
        for j, job in enumerate(self.jobs):
            shares, held = self.board.shares[j], self.held[j]
            if shares and shares == held:
                allocation[job.id] = self.snapshot.placement(job.id)
                continue
            if shares:
                allocation[job.id] = Placement(tuple((self.nodes[n].id, count) for n, count in shares))
            before, after = sum(count for _, count in held), sum(count for _, count in shares)
            reasons[job.id] = Reason(_code(before, after), self._numbers(j, before, after))
        return Decision(allocation, reasons=reasons)

    def _numbers(self, j: int, before: int, after: int) -> dict[str, float]:
        numbers = {
            "gpus_before": float(before),
            "gpus_after": float(after),
            "fair_gpus": float(self.objective.fair_gpus),
            "restart_factor": float(self.table.factors[j]),
            "speedup_before": float(self.table.stay_speedups[j]),
        }
        shares = self.board.shares[j]
        if shares:
            column = self.table.column.get((self.table.type_of[shares[0][0]], after))
            if column is not None:
                numbers["speedup_after"] = float(self.table.speedups[j, column - FIRST])
        return numbers


def _code(before: int, after: int) -> str:
    if not after:
        return "preempted" if before else "waits-for-gpus"
    if not before:
        return "started"
    if after == before:
        return "moved"
    return "grew" if after > before else "shrank"
