"""The guard rail: notices that the loss jumped after a change of batch, and says how long adaptation stays frozen.

`training.rounds` rolls back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pollux.agent.adaptation.state_version import require_version
from pollux.core.errors import InvalidInput

__all__ = ["LossGuard", "Spike"]

_VERSION = 1
_BASELINE_ROUNDS = 16
_FEWEST_ROUNDS = 6
_WATCHED_ROUNDS = 8
# More than the usual three: after 16 rounds the robust deviation is itself uncertain by a quarter.
_DEVIATIONS = 5.0
_HUGE_DEVIATIONS = 15.0
_SUSTAINED = 2
# A rise below 5 · 2 % of the level is not worth a roll-back, however little the loss varied.
_LEAST_RELATIVE = 0.02
_LARGEST_LOSS = 1e100
_MAD_TO_DEVIATION = 1.4826
_LOST_TO_THE_LINE = 5.0
_FREEZE_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class Spike:
    """A jump of the loss after a change of batch, noticed `rounds` rounds later.

    `expected` is the expected loss, `deviation` its usual noise. With too few rounds before the change
    `deviation` is 0; then only a loss that is not finite is a spike.
    """

    loss: float
    expected: float
    deviation: float
    rounds: int

    def __str__(self) -> str:
        if not _is_usable(self.loss):
            return f"the loss became {self.loss} in round {self.rounds} after the change"
        above = (self.loss - self.expected) / self.deviation
        return (
            f"loss {self.loss:.4g} against {self.expected:.4g} expected, {above:.1f} deviations above, "
            f"in round {self.rounds} after the change"
        )


@dataclass(frozen=True, slots=True)
class _Round:
    loss: float
    samples: int


@dataclass(frozen=True, slots=True)
class _Baseline:
    level: float
    slope: float
    deviation: float
    samples: float


class LossGuard:
    """Watches the mean loss of rounds (several steps each) for a spike in the 8 rounds after a change of batch.

    A robust line (Theil and Sen) is fitted to the last 16 rounds before the change; the deviation is their median
    absolute one from it, at least 2 % of the level. The loss expected after the change stays at that level, or
    continues to rise. A spike is 5 deviations above the expected loss in 2 successive rounds, 15 in one, or a loss that
    is not finite. With fewer than 6 rounds before the change only a loss that is not finite counts.

    A spike freezes adaptation for `freeze_progress` (samples of progress), each further one for twice as long.
    """

    def __init__(self, freeze_progress: float) -> None:
        if not (math.isfinite(freeze_progress) and freeze_progress > 0.0):
            raise InvalidInput(f"freeze_progress is {freeze_progress}: give a finite number of samples above 0")
        self._first_freeze = freeze_progress
        self._before: list[_Round] = []
        self._after: list[_Round] | None = None
        self._baseline: _Baseline | None = None
        self._frozen_until = 0.0
        self._times_frozen = 0

    @property
    def is_watching(self) -> bool:
        """Whether a change is so recent that it would be the cause of a spike."""
        return self._after is not None

    def record(self, loss: float, samples: int) -> None:
        """Add a round, with the mean loss over its `samples` samples; accepts a change after 8 rounds."""
        entry = _Round(loss, max(samples, 1))
        if self._after is None:
            if _is_usable(loss):
                self._before = [*self._before, entry][-_BASELINE_ROUNDS:]
            return
        if len(self._after) >= _WATCHED_ROUNDS:
            self.accept_change()
            self.record(loss, samples)
            return
        self._after.append(entry)

    def changed(self) -> None:
        """Note a change of batch: later rounds are compared with those before."""
        self.accept_change()
        self._baseline = _baseline(self._before)
        self._after = []

    def verdict(self) -> Spike | None:
        """The spike in the rounds since the last change; None where there is none."""
        if not self._after:
            return None
        last = self._after[-1]
        rounds = len(self._after)
        base = self._baseline
        if not _is_usable(last.loss):
            return Spike(last.loss, base.level if base else math.nan, base.deviation if base else 0.0, rounds)
        if base is None:
            return None
        above = [_above(base, entry, index) for index, entry in enumerate(self._after, start=1)]
        sustained = rounds >= _SUSTAINED and min(above[-_SUSTAINED:]) > _DEVIATIONS
        if not sustained and above[-1] <= _HUGE_DEVIATIONS:
            return None
        return Spike(last.loss, _expected(base, rounds), _deviation(base, last), rounds)

    def freeze(self, progress: float) -> None:
        """Freeze adaptation from this progress on, and forget the rounds since the change, which a roll-back undoes."""
        self._frozen_until = progress + self._first_freeze * _FREEZE_GROWTH**self._times_frozen
        self._times_frozen += 1
        self._after = None
        self._baseline = None

    def is_frozen(self, progress: float) -> bool:
        """Whether adaptation is frozen at this progress."""
        return progress < self._frozen_until

    @property
    def frozen_until(self) -> float:
        """The progress, in samples, at which the freeze ends; 0 before the first one."""
        return self._frozen_until

    def state_dict(self) -> dict[str, Any]:
        """The guard as plain values for JSON, without rounds whose loss is not finite."""
        after = None if self._after is None else [entry for entry in self._after if _is_usable(entry.loss)]
        base = self._baseline
        return {
            "version": _VERSION,
            "before": [[entry.loss, entry.samples] for entry in self._before],
            "after": None if after is None else [[entry.loss, entry.samples] for entry in after],
            "baseline": None if base is None else [base.level, base.slope, base.deviation, base.samples],
            "frozen_until": self._frozen_until,
            "times_frozen": self._times_frozen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        require_version("the loss guard", state, _VERSION)
        after, base = state["after"], state["baseline"]
        self._before = [_Round(*entry) for entry in state["before"]]
        self._after = None if after is None else [_Round(*entry) for entry in after]
        self._baseline = None if base is None else _Baseline(*base)
        self._frozen_until = float(state["frozen_until"])
        self._times_frozen = int(state["times_frozen"])

    def accept_change(self) -> None:
        """Accept the last change: its rounds become rounds before the next change."""
        after = [entry for entry in self._after or () if _is_usable(entry.loss)]
        self._before = [*self._before, *after][-_BASELINE_ROUNDS:]
        self._after = None
        self._baseline = None


def _is_usable(loss: float) -> bool:
    """Whether a loss is finite, and small enough that differences of losses are finite too."""
    return abs(loss) <= _LARGEST_LOSS


def _baseline(rounds: Sequence[_Round]) -> _Baseline | None:
    """The loss level at the end, its slope per round and its robust deviation; None if there are too few rounds."""
    count = len(rounds)
    if count < _FEWEST_ROUNDS:
        return None
    losses = [entry.loss for entry in rounds]
    slope = median((losses[b] - losses[a]) / (b - a) for a in range(count) for b in range(a + 1, count))
    middle = median(loss - slope * (index - count + 1) for index, loss in enumerate(losses))
    residuals = [loss - middle - slope * (index - count + 1) for index, loss in enumerate(losses)]
    # Where the curve is bent, the line ends below it; then the last rounds give a better level.
    level = max(middle, median(losses[-_FEWEST_ROUNDS // 2 :]))
    mad = _MAD_TO_DEVIATION * median(abs(residual) for residual in residuals)
    # The line follows some of the noise, more so with fewer rounds.
    mad *= 1.0 + _LOST_TO_THE_LINE / count
    deviation = max(mad, _LEAST_RELATIVE * abs(level), 1e-12)
    return _Baseline(level, slope, deviation, median(entry.samples for entry in rounds))


def _expected(base: _Baseline, rounds: int) -> float:
    return base.level + max(base.slope, 0.0) * rounds


def _deviation(base: _Baseline, entry: _Round) -> float:
    """The usual noise of a round; larger where it has fewer samples than the rounds before the change."""
    return base.deviation * math.sqrt(max(base.samples / entry.samples, 1.0))


def _above(base: _Baseline, entry: _Round, rounds: int) -> float:
    """How many deviations a round lies above the expected loss; infinite where its loss is not finite."""
    if not _is_usable(entry.loss):
        return math.inf
    return (entry.loss - _expected(base, rounds)) / _deviation(base, entry)
