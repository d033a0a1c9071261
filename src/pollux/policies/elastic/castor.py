"""Castor: goodput as in Pollux, GPUs by rank of remaining work, with models remembered by kind of job."""

from __future__ import annotations

from dataclasses import replace

from pollux.core import BatchMode, Decision, InvalidInput, Snapshot
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.policies.search.solution import SolverRules, solve

__all__ = ["Castor"]

_POWERS = (0.05, 1.0)
_CURVES = (0.05, 0.95)


class Castor:
    """Maximise `Σ w·c·(ρ·speedup)^p`: whoever has least left goes first, by what a second of its work costs all.

    `power` is p. `curve` is the q of speed-ups k^q for which the costs c by rank are the best. `rank`, `bank`,
    `size_factor` and `doubt` switch off the costs by rank, models of earlier jobs of the same kind, the resize factor
    by remaining work, and doubts in what jobs say they have left. `fairness_bound` is the projected finish-time
    fairness from which on a job is owed its fair share; `None` for never. `growth` is by how many times a job may
    pass what it was measured on.
    """

    name = "castor"
    batch: BatchMode = "adaptive"

    def __init__(
        self,
        power: float = 0.85,
        curve: float = 0.8,
        growth: int = 4,
        fairness_bound: float | None = 2.0,
        rank: bool = True,
        bank: bool = True,
        size_factor: bool = True,
        doubt: bool = True,
        avoid_interference: bool = True,
        growth_gain: float = 0.05,
    ) -> None:
        for name, value, (least, most) in (("power", power, _POWERS), ("curve", curve, _CURVES)):
            if not least <= value <= most:
                raise InvalidInput(f"{name} is {value}; give {least:g} to {most:g}")
        if growth < 1:
            raise InvalidInput(f"growth is {growth}; give 1 or more")
        if fairness_bound is not None and not fairness_bound >= 1.0:
            raise InvalidInput(f"fairness_bound is {fairness_bound}; give 1 or more, or None")
        self.power, self.curve, self.growth, self.fairness_bound = power, curve, growth, fairness_bound
        self.rank, self.bank, self.size_factor, self.doubt = rank, bank, size_factor, doubt
        self.avoid_interference, self.growth_gain = avoid_interference, growth_gain
        self.needs = frozenset({"goodput", "prior"} if bank else {"goodput"})

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Ranks, then counts, then places."""
        rule = RankRule(
            power=self.power,
            curve=self.curve,
            growth=self.growth,
            fairness_bound=self.fairness_bound,
            rank=self.rank,
            bank=self.bank,
            size_factor=self.size_factor,
            doubt=self.doubt,
        )
        objective = RankedWork(snapshot, rule)
        decision = solve(snapshot, objective, SolverRules(self.avoid_interference, self.growth_gain))
        return replace(decision, memory=objective.memory(decision.allocation))
