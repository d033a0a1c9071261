"""How often there is a round, and how often a step is measured, so that both cost little.

All numbers come from replica 0's clock, through the exchange, so that the pace is the same on every replica.
"""

from __future__ import annotations

import math

__all__ = ["RoundPace"]

_ROUND_SECONDS = 1.0
_ROUND_STEPS = (10, 20)
_EXACT_ROUND_SECONDS = 5.0
_EXACT_ROUND_STEPS = (20, 200)
# The first measured steps come in a burst, which costs more but is short: a hundred give a narrow interval if the noise
# scale is near the batch; if it is far above, it takes as many as the average is worth. Then the budget holds.
_BURST_MEASURED = (100, 200)
_BURST_ROUNDS = 8
_BURST_COST = 0.1
_BURST_EVERY = (2, 4)
_COST = 0.005
# Halving a batch that fills the GPU costs up to a third of a step; measuring one step in 64 keeps to the budget.
_EVERY = (4, 64)
# So short a step is bound by kernel launches, not by work: a larger batch gains more than measuring costs.
_SHORT_SECONDS = 0.01
_SHORT_EVERY = 8
_SHORT_BURST_EVERY = 2


class RoundPace:
    """When the next round is due, and which steps are measured.

    `measures_every` is the distance between measured steps; `rounds_since_change` counts the rounds since the batch or
    the replicas changed.
    """

    def __init__(self, adapts: bool) -> None:
        self.measures_every = _BURST_EVERY[0]
        self.rounds_since_change = 0
        self._adapts = adapts
        self._round_steps = _ROUND_STEPS[0]
        self._next_round = self._round_steps

    def is_round(self, step: int) -> bool:
        """Whether a round is due after this step."""
        return step >= self._next_round

    def is_measured(self, step: int) -> bool:
        """Whether to measure this step."""
        return step % self.measures_every == 0

    def schedule_round(self, step: int) -> None:
        """Set the next round to one whole round after this step."""
        self._next_round = step + self._round_steps

    def start_again(self) -> None:
        """Forget the length of rounds: the replicas have changed."""
        self._round_steps = _ROUND_STEPS[0]
        self.rounds_since_change = 0

    def end_round(self, step: int, step_seconds: float) -> None:
        """End the round of this step: set the length of the next one by the time of a step."""
        low, high = _ROUND_STEPS if self._adapts else _EXACT_ROUND_STEPS
        length = _ROUND_SECONDS if self._adapts else _EXACT_ROUND_SECONDS
        if math.isfinite(step_seconds) and step_seconds > 0.0:
            self._round_steps = min(max(math.ceil(length / step_seconds), low), high)
        self.schedule_round(step)
        self.rounds_since_change += 1

    def set_measuring(self, step_seconds: float, cost: float, num_measured: int, is_clear: bool) -> None:
        """Set how often a step is measured; measuring adds `cost` to a step, relative to its time.

        `num_measured` steps were measured so far; `is_clear` says that the noise is known well enough to set a batch.
        """
        enough = _BURST_MEASURED[1 if self._adapts and not is_clear else 0]
        burst = num_measured < enough or self.rounds_since_change < _BURST_ROUNDS
        budget, (least, most) = (_BURST_COST, _BURST_EVERY) if burst else (_COST, _EVERY)
        if step_seconds < _SHORT_SECONDS:
            most = _SHORT_BURST_EVERY if burst else _SHORT_EVERY
        wanted = math.ceil(cost / budget) if math.isfinite(cost) else self.measures_every
        self.measures_every = min(max(wanted, least), most)
