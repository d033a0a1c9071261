"""The objective of `castor`: what a second of each job's work costs all jobs, by its rank in remaining work.

The law and its constants are in docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pollux.core import Allocation, InvalidInput, JobView, Snapshot
from pollux.goodput import GoodputModel
from pollux.policies.search.accounts import Account, Accounts, believed
from pollux.policies.search.objective import FloatArray, Objective, restart_factors

__all__ = ["RankRule", "RankedWork"]

IntArray = npt.NDArray[np.int64]

_POWERS = (0.05, 1.0)
_CURVES = (0.05, 0.95)
# A placement is assumed to last no longer than this.
_HORIZON_SECONDS = 300.0

# Sizes in seconds: the least that a job counts for, and that of a job without any information.
_LEAST_SECONDS = 1.0
_UNKNOWN_SECONDS = 600.0
# A job that outlives its kind's work has at least this share of it left.
_LEAST_LEFT = 0.1
# A job whose step time differs by more than this factor from that of its kind keeps its own model.
_ODD = 1.5
# From the bound on, the floor rises over this range of lateness, to this multiple of the greatest cost by rank.
_FLOOR_RANGE = 0.5
_FLOOR_WEIGHT = 4.0
# From this many crashes on, a job gets no more than its minimum: it would only disturb others.
_CRASHES = 2


@dataclass(frozen=True, slots=True)
class RankRule:
    """The ingredients of the objective, each with its switch.

    `power` is p. `curve` is the q of speed-ups k^q for which the costs c by rank are the best. A job may have
    `growth` times the GPUs that it was measured on. A job is owed its fair share from the projected finish-time
    fairness `fairness_bound` on; `None` for never. The others are switches. `rank`: costs by rank. `bank`: models of
    earlier jobs of the same kind. `size_factor`: the resize factor by remaining work. `doubt`: doubts in reported
    remaining work. `steady`: a job moves only for more than its predictions waver by. `corrected`: corrections of fits
    by measurements. `crash_cap`: a job that keeps crashing gets no more than its minimum.
    """

    power: float = 0.85
    curve: float = 0.8
    growth: int = 4
    fairness_bound: float | None = 2.0
    rank: bool = True
    bank: bool = True
    size_factor: bool = True
    doubt: bool = True
    steady: bool = True
    corrected: bool = True
    crash_cap: bool = True

    def __post_init__(self) -> None:
        for name, value, (least, most) in (("power", self.power, _POWERS), ("curve", self.curve, _CURVES)):
            if not least <= value <= most:
                raise InvalidInput(f"{name} is {value}; give {least:g} to {most:g}")
        if self.growth < 1:
            raise InvalidInput(f"growth is {self.growth}; give 1 or more")
        if self.fairness_bound is not None and not self.fairness_bound >= 1.0:
            raise InvalidInput(f"fairness_bound is {self.fairness_bound}; give 1 or more, or None")


class RankedWork(Objective):
    """Maximise `Σ w·c·(ρ·speedup)^p`, with c by rank of remaining work, and a floor for jobs that fall behind."""

    def __init__(self, snapshot: Snapshot, rule: RankRule) -> None:
        self.rule, self.snapshot, self.corrected = rule, snapshot, rule.corrected
        self.views = snapshot.jobs
        jobs = [_informed(job, snapshot) for job in snapshot.jobs] if rule.bank else snapshot.jobs
        super().__init__(snapshot, jobs, rule.power)
        self.user_weights = self.weights
        self.hopeless = np.zeros(len(jobs), dtype=np.bool_)
        self.holds = np.array([bool(snapshot.placement(job.id)) for job in jobs], dtype=np.bool_)
        # The fair share may be a fraction of GPUs; by the curve, the speed-up on it is the same for all jobs.
        share = self.num_gpus / max(len(jobs), 1)
        self.fair_speedup = share if share < 1.0 else (share / self.fair_gpus) ** rule.curve
        self.before = snapshot.memory if isinstance(snapshot.memory, Accounts) else None
        self.accounts: dict[str, Account] = {}

    def caps(self) -> IntArray:
        """Most GPUs each job may have: `growth` times the most that it, or its kind, was measured on."""
        rule = self.rule
        found = np.empty(len(self.views), dtype=np.int64)
        for i, job in enumerate(self.views):
            known = job.largest_gpus
            if rule.bank and job.prior is not None:
                known = max(known, job.prior.largest_gpus)
            most = rule.growth * max(known, 1)
            if rule.crash_cap and job.crashes >= _CRASHES:
                most = 1
            found[i] = min(max(most, job.limits.min_gpus), job.limits.max_gpus)
        return found

    def _repaired(self, base: FloatArray) -> FloatArray:
        """The same; a job that may not have its fair share is compared with the most that it may have."""
        base = super()._repaired(base)
        for i, job in enumerate(self.jobs):
            most, function = job.limits.max_gpus, job.goodput
            if most >= self.fair_gpus:
                continue
            found = most if function is None else self._on_one_node(function, most)
            base[i] = found if found > 0.0 else base[i]
        return base

    def prepare(self, held_speedups: FloatArray) -> None:
        """Compute sizes, ranks and floors from the speed-ups of jobs where they are now."""
        self.gangs = np.array([max(1.0, job.limits.min_gpus / self.fair_gpus) for job in self.jobs])
        self.fair_speedups = self._least_shares()
        self._keep_accounts(held_speedups)
        self._measure_sizes()
        count, rule = len(self.jobs), self.rule
        exponent = 1.0 / (1.0 - rule.curve)
        steps = np.arange(count + 1, dtype=float) / max(count, 1)
        costs = np.diff(steps**exponent) ** (1.0 - rule.curve)
        self.ranks = np.empty(count, dtype=np.int64)
        # Of equal sizes the earlier job goes first.
        self.ranks[np.lexsort((-np.arange(count), -self.ranked))] = np.arange(count)
        self.rank_costs = costs[self.ranks] if rule.rank else np.ones(count)
        self.weights = self.user_weights * self.rank_costs
        self.resize_costs = np.array([job.resize_cost_seconds for job in self.jobs], dtype=float)
        self.floors = np.zeros(count)
        if rule.fairness_bound is not None:
            self.lateness = self._lateness()
            urgency = np.clip((self.lateness - rule.fairness_bound) / _FLOOR_RANGE, 0.0, 1.0)
            self.floors = _FLOOR_WEIGHT * self.user_weights * self.gangs * urgency
        self.restart_factors = np.where(self.holds, self._factors(), 1.0)

    def _least_shares(self) -> FloatArray:
        """The speed-up that each job is owed: on its fair share, or on its minimum where that is more."""
        owed = np.full(len(self.jobs), self.fair_speedup)
        for j in np.flatnonzero(self.gangs > 1.0).tolist():
            least, function = self.jobs[j].limits.min_gpus, self.jobs[j].goodput
            rate = float(least) if function is None else self._on_one_node(function, least)
            owed[j] = max(owed[j], rate / max(self.fair_goodputs[j], 1e-12))
        return owed

    def _lateness(self) -> FloatArray:
        """Finish-time fairness that each job would end with on its fair share from now on.

        A job of unknown size is assumed to have no more left than it has received, or than a resize costs: it may be
        short, and a short job is late long before others.
        """
        age = self.snapshot.now - np.array([job.submitted_at + job.hidden_seconds for job in self.jobs], dtype=float)
        received = np.array([self.accounts[job.id].received for job in self.jobs])
        likely = np.maximum(np.maximum(received, self.resize_costs), _LEAST_SECONDS)
        sizes = np.where(self.guessed | self.doubted, np.minimum(self.sizes, likely), self.sizes)
        sizes = np.maximum(sizes * (self.fair_speedup / self.fair_speedups), _LEAST_SECONDS)
        late: FloatArray = (age + sizes) / np.maximum(received + sizes, _LEAST_SECONDS)
        return late

    def _factors(self) -> FloatArray:
        """What a move leaves of a running job's speed-up."""
        if self.rule.size_factor:
            factors = 1.0 - self.resize_costs / np.minimum(_HORIZON_SECONDS, self.sizes)
        else:
            factors = restart_factors(self.snapshot, self.jobs)
        if self.rule.steady:
            factors = factors - np.array([self.accounts[job.id].waver for job in self.jobs])
        return np.clip(factors, 0.0, 1.0)

    def weighted_costs(self, speedups: FloatArray, moved: bool = False) -> FloatArray:
        """`−w·c·v^p − floor·min(v / fair, 1)^p` with `v = ρ·speedup`."""
        weights, floors, factors, owed = self.weights, self.floors, self.restart_factors, self.fair_speedups
        if speedups.ndim == 2:
            weights, floors, factors, owed = weights[:, None], floors[:, None], factors[:, None], owed[:, None]
        values: FloatArray = speedups * factors if moved else speedups
        costs: FloatArray = -weights * values**self.rule.power
        if self.floors.any():
            costs -= floors * np.minimum(values / owed, 1.0) ** self.rule.power
        return costs

    def memory(self, allocation: Allocation) -> Accounts:
        """What to remember: the accounts, with the pauses of jobs that move now."""
        now, running = self.snapshot.now, self.snapshot.running
        for job in self.jobs:
            after = allocation.get(job.id)
            if after and after != running.get(job.id):
                self.accounts[job.id] = self.accounts[job.id].moved(now + job.resize_cost_seconds)
        return (self.before or Accounts(now)).kept(now, self.accounts)

    def _keep_accounts(self, held_speedups: FloatArray) -> None:
        now, share = self.snapshot.now, self.num_gpus / max(len(self.jobs), 1)
        rates = (held_speedups * self.fair_goodputs).tolist()
        fair_rates = (held_speedups / self.fair_speedups).tolist()
        known: Mapping[str, Account] = {} if self.before is None else self.before.by_job
        since = now if self.before is None else min(self.before.at, now)
        for job, rate, fair_rate in zip(self.jobs, rates, fair_rates, strict=True):
            account = known.get(job.id)
            if account is None:
                owed = share if job.limits.min_gpus <= self.fair_gpus else float(job.limits.min_gpus)
                account = Account(min(job.attained_gpu_seconds / owed, max(now - job.submitted_at, 0.0)))
            seconds = now - max(since, min(account.paused_until, now))
            self.accounts[job.id] = account.after(seconds, rate, fair_rate, job)

    def _measure_sizes(self) -> None:
        """Seconds that each job has left on its fair share, as far as its reports are believed."""
        count = len(self.jobs)
        left = np.full(count, np.nan)
        self.doubted = np.zeros(count, dtype=np.bool_)
        for i, job in enumerate(self.jobs):
            if job.goodput is not None:
                left[i], self.doubted[i] = self._work_left(job)
        self._left = left
        sizes = left / np.maximum(self.fair_goodputs * self.fair_speedup, 1e-12)
        self.guessed = np.isnan(sizes)
        sure = sizes[~self.guessed & ~self.doubted]
        middle = float(np.median(sure)) if len(sure) else _UNKNOWN_SECONDS
        sizes[self.guessed | self.doubted] = middle
        self.sizes = np.maximum(sizes, _LEAST_SECONDS)
        # A job whose reports stand still goes last; what it is owed does not depend on them.
        self.ranked = np.where(self.doubted, np.inf, self.sizes)

    def _work_left(self, job: JobView) -> tuple[float, bool]:
        """Useful samples that a job has left, NaN if unknown, and whether its reports stand still."""
        account = self.accounts[job.id]
        if job.remaining is not None:
            return believed(account, job.remaining) if self.rule.doubt else (job.remaining, False)
        if self.rule.bank and job.prior is not None and job.prior.total is not None:
            return max(job.prior.total - account.worked, _LEAST_LEFT * job.prior.total), False
        return np.nan, False

    @property
    def remaining(self) -> Sequence[float | None]:
        """Useful samples that each job has left, where it reports them and they fall as it works."""
        return [
            None if job.remaining is None or doubted else left
            for job, doubted, left in zip(self.jobs, self.doubted.tolist(), self._left.tolist(), strict=True)
        ]

    def numbers(self, j: int) -> Mapping[str, float]:
        """Rank and size of a job, how its size is uncertain, and its lateness."""
        numbers = {"rank": float(len(self.jobs) - self.ranks[j]), "left_seconds": float(self.sizes[j])}
        if self.guessed[j]:
            numbers["left_assumed"] = 1.0
        if self.doubted[j]:
            numbers["left_doubted"] = 1.0
        if self.floors[j] > 0.0:
            numbers["lateness"] = float(self.lateness[j])
        return numbers


def _can_run(job: JobView, model: GoodputModel) -> bool:
    """Whether a model, with the batch limits of another job, lets the job run on any number of GPUs that it allows."""
    fewest = max(model.min_gpus, job.limits.min_gpus)
    return fewest <= min(model.max_gpus, job.limits.max_gpus)


def _informed(job: JobView, snapshot: Snapshot) -> JobView:
    """The job with the curve of its kind, unless its own model differs too much."""
    prior, own = job.prior, job.goodput
    if prior is None or not isinstance(prior.goodput, GoodputModel):
        return job
    if own is None:
        return replace(job, goodput=prior.goodput) if _can_run(job, prior.goodput) else job
    if not isinstance(own, GoodputModel):
        return job
    pooled = replace(own, throughput=prior.goodput.throughput, by_type=prior.goodput.by_type)
    placement = snapshot.placement(job.id)
    if placement:
        at = float(placement.num_nodes), float(placement.num_gpus), float(own.limits.local_max)
        ratio = own.throughput.step_seconds(*at) / pooled.throughput.step_seconds(*at)
        if not 1.0 / _ODD < ratio < _ODD:
            return job
    return replace(job, goodput=pooled)
