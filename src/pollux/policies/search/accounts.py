"""What each job has received and promised, from decision to decision: a policy's memory, as a value.

Without it (a restart loses it) a job is taken to have received what its attained GPU time says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Account", "Accounts", "believed"]

# How much of what a job says it has left counts as evidence for what it says, against work that was seen.
_TRUST = 0.25
# Between these, what a job says goes down as it works, as far as its model can tell.
_HONEST = (0.67, 1.5)
# Below this, what a job says does not go down as it works.
_STANDS_STILL = 0.1
_LEAST_RATIO = 0.02


class Account(NamedTuple):
    """One job: fair seconds received, what it first said it had left, useful samples worked since, end of its pause."""

    received: float = 0.0
    promised: float | None = None
    worked: float = 0.0
    paused_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Accounts:
    """All accounts, as they were at the decision `at`."""

    at: float
    by_job: Mapping[str, Account] = field(default_factory=dict)


def believed(account: Account, remaining: float) -> tuple[float, bool]:
    """Useful samples that a job has left, by what it says and by what it did; and whether its word stands still.

    What it says should fall by what it works. With L said now, P at first, and W worked since:
    ratio = (P − L + trust·L) / (W + trust·L), and it has L / ratio left.
    """
    if account.promised is None or account.worked <= 0.0:
        return remaining, False
    ratio = (account.promised - remaining + _TRUST * remaining) / (account.worked + _TRUST * remaining)
    if _HONEST[0] <= ratio <= _HONEST[1]:
        return remaining, False
    return remaining / max(ratio, _LEAST_RATIO), ratio < _STANDS_STILL
