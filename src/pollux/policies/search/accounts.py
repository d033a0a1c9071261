"""What each job has received and reported, from decision to decision: a policy's memory.

Without it (a restart loses it) what a job received follows from its attained GPU time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pollux.core import JobView

__all__ = ["Account", "Accounts", "believed"]

# The share of a job's reported remaining work that counts as evidence for its reports, beside work that was seen.
_TRUST = 0.25
# Between these, a job's reports fall as it works, as far as its model can tell.
_HONEST = (0.67, 1.5)
# Below this, a job's reports do not fall as it works.
_STANDS_STILL = 0.1
_LEAST_RATIO = 0.02
# Of how many jobs that are not in the snapshot (paused, in back-off, or ended) the accounts are kept, the newest.
_MOST_ABSENT = 1000
# The weight of the newest change of a job's prediction in the mean of such changes.
_NEWEST = 0.3


class Account(NamedTuple):
    """One job: fair seconds received, most work reported as left, useful samples since its first report,
    end of its pause.

    `foreseen` is the goodput that its model predicted for its placement at the last decision, 0 without a model. While
    the job stayed, changes of its logarithm had the mean size `change` and the signed mean `drift`.
    """

    received: float = 0.0
    promised: float | None = None
    worked: float = 0.0
    paused_until: float = 0.0
    foreseen: float = 0.0
    change: float = 0.0
    drift: float = 0.0

    @property
    def waver(self) -> float:
        """By what share predictions for one place fluctuate; changes in one direction are learning, not error."""
        return self.change - abs(self.drift)

    def after(self, seconds: float, rate: float, fair_rate: float, job: JobView) -> Account:
        """The account once the job has worked for `seconds` at `rate`, in useful samples and in fair seconds."""
        received, promised, worked, paused_until, foreseen, change, drift = self
        if rate > 0.0:
            if seconds > 0.0:
                received += fair_rate * seconds
                worked += rate * seconds
            if foreseen > 0.0 and rate != foreseen:
                newest = math.log(rate / foreseen)
                change += _NEWEST * (abs(newest) - change)
                drift += _NEWEST * (newest - drift)
            foreseen = rate if job.goodput is not None else 0.0
        if job.remaining is not None:
            # A word that rises keeps the work done since the first one: who raises it slowly is not believed for ever.
            promised, worked = (job.remaining, 0.0) if promised is None else (max(promised, job.remaining), worked)
        return Account(received, promised, worked, paused_until, foreseen, change, drift)

    def moved(self, paused_until: float) -> Account:
        """The account of a job that moves and pauses until `paused_until`."""
        return self._replace(paused_until=paused_until, foreseen=0.0)


@dataclass(frozen=True, slots=True)
class Accounts:
    """All accounts, as they were at the decision `at`."""

    at: float
    by_job: Mapping[str, Account] = field(default_factory=dict)

    def kept(self, now: float, by_job: Mapping[str, Account]) -> Accounts:
        """The accounts, with those of `by_job` as they are `now`; a job that is not seen for a while keeps its own."""
        absent = [job_id for job_id in self.by_job if job_id not in by_job][-_MOST_ABSENT:]
        return Accounts(now, {job_id: self.by_job[job_id] for job_id in absent} | dict(by_job))


def believed(account: Account, remaining: float) -> tuple[float, bool]:
    """Useful samples that a job has left, by its reports and its work; and whether its reports stand still.

    Reports should fall by the work done. With L reported now, P at first, and W worked since:
    ratio = (P − L + trust·L) / (W + trust·L), and L / ratio are left.
    """
    if account.promised is None or account.worked <= 0.0:
        return remaining, False
    ratio = (account.promised - remaining + _TRUST * remaining) / (account.worked + _TRUST * remaining)
    if _HONEST[0] <= ratio <= _HONEST[1]:
        return remaining, False
    return remaining / max(ratio, _LEAST_RATIO), ratio < _STANDS_STILL
