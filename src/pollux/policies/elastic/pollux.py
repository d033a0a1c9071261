"""Pollux (Qiao et al., OSDI'21): goodput with fairness, found by a solver of our own.

Counts by a near-exact knapsack, then a placement that keeps unchanged jobs and clears room at the least cost.
"""

from __future__ import annotations

from dataclasses import replace

from pollux.core import BatchMode, Decision, Snapshot
from pollux.policies.search.objective import Objective, check_fairness
from pollux.policies.search.solution import SolverRules, solve
from pollux.policies.search.turns import Turns, turn_weights

__all__ = ["Pollux"]


class Pollux:
    """Maximise the power mean of restart-weighted speed-ups; `search.objective` has the formulas.

    `fairness` is p: 1 for none, -1 as published, -10 for strict. A job at most doubles the largest number of
    GPUs it has run with. With `avoid_interference` at most one distributed job uses a node, unless the node
    isolates traffic. `growth_gain` is the least saving, as a share of its cost, for which a running job grows
    into GPUs that would stay idle.
    """

    name = "pollux"
    needs: frozenset[str] = frozenset({"goodput"})
    batch: BatchMode = "adaptive"

    # By the published formula a job of age 0 has ρ = 0: whether it starts would not matter to the objective.
    # This little is enough to start it, and leaves the objective of all others as published.
    start_floor = 0.02

    def __init__(self, fairness: float = -1.0, avoid_interference: bool = True, growth_gain: float = 0.05) -> None:
        check_fairness(fairness)
        self.fairness = fairness
        self.avoid_interference = avoid_interference
        self.growth_gain = growth_gain

    def objective(self, snapshot: Snapshot, turns: Turns | None = None) -> Objective:
        """What is to be maximised on this snapshot."""
        objective = Objective(snapshot, snapshot.jobs, self.fairness, self.start_floor)
        weights = turn_weights(snapshot, turns or Turns())
        if weights is not None:
            objective.weights = objective.weights * weights
        return objective

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Choose counts, then places, then use GPUs that are left."""
        turns = snapshot.memory if isinstance(snapshot.memory, Turns) else Turns()
        rules = SolverRules(self.avoid_interference, self.growth_gain)
        decision = solve(snapshot, self.objective(snapshot, turns), rules)
        return replace(decision, memory=turns.after(snapshot, decision.allocation))
