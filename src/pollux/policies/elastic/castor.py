"""Castor: goodput as in Pollux, GPUs by rank of remaining work, with models remembered by kind of job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pollux.core import BatchMode, Decision, Snapshot
from pollux.policies.search.ranks import RankedWork, RankRule
from pollux.policies.search.solution import SolverRules, solve

__all__ = ["Castor"]


@dataclass(frozen=True, slots=True)
class Castor(RankRule):
    """Maximise `Σ w·c·(ρ·speedup)^p`: the job with least left goes first, by what a second of its work costs all jobs.

    The options are those of `RankRule`, and `avoid_interference`, `growth_gain` and `fill_idle` of `SolverRules`.
    """

    avoid_interference: bool = True
    growth_gain: float = 0.05
    fill_idle: bool = True

    name: ClassVar[str] = "castor"
    batch: ClassVar[BatchMode] = "adaptive"

    @property
    def needs(self) -> frozenset[str]:
        """Models of earlier jobs, unless the bank is switched off."""
        return frozenset({"goodput", "prior"} if self.bank else {"goodput"})

    def allocate(self, snapshot: Snapshot) -> Decision:
        """Choose ranks, then counts, then places."""
        objective = RankedWork(snapshot, self)
        decision = solve(snapshot, objective, SolverRules(self.avoid_interference, self.growth_gain, self.fill_idle))
        return replace(decision, memory=objective.memory(decision.allocation))
