"""A model of how an optimiser's second moments follow a change of batch, and so of the length of its steps.

It runs on the host and uses gains alone, never the moments themselves. `adaptation` derives the worth of a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pollux.agent.adaptation.measurements import GroupedOptimizer

__all__ = ["SecondMoments"]

_DECAYS = {"adam": "betas", "adamax": "betas", "amsgrad": "betas", "rmsprop": "alpha", "adadelta": "rho"}
_FORGETFUL = ("adam", "adamax", "rmsprop", "adadelta")
_DEFAULT_DECAY = 0.999


class SecondMoments:
    """The ratio r of second moments to those of training at the initial batch M0, by parameter group.

    A gradient of S·M0 samples has 1/gain(S) times the squared length. So, with worth in steps at M0:

    | kind | level | filled | r |
    |---|---|---|---|
    | adam and kin, decay β | β·level + (1 − β)/gain | β·filled + (1 − β) | level/filled |
    | amsgrad | as adam | as adam | greatest level/filled |
    | adagrad, which sums | level + 1/gain | filled + worth | level/filled |

    `filled` is the `level` of a run at M0; dividing by it is Adam's own correction for a start from zero. AdaGrad's sum
    never forgets, so it is compared with the sum of a run at M0 at the same progress. With the same learning rate a
    step is 1/√r times as long as one at M0. `steps` is the number of steps at M0 that the optimiser has done already.
    """

    def __init__(self, kind: str, decays: Sequence[float], steps: int = 0) -> None:
        self.kind = kind
        self._decays = list(decays)
        self._filled = [float(steps) if kind == "adagrad" else 1.0 - decay**steps for decay in decays]
        self._level = list(self._filled)
        self._most = list(self._filled)

    @classmethod
    def of(cls, optimizer: GroupedOptimizer, kind: str) -> SecondMoments | None:
        """The model for an optimiser with that preconditioner; None where it has none. May wait for the device."""
        if kind != "adagrad" and kind not in _DECAYS:
            return None
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        return cls(kind, _decays(optimizer, kind), int(steps[0]) if steps else 0)

    def match_groups(self, optimizer: GroupedOptimizer) -> None:
        """Adopt the groups that were added since, and the decays that changed."""
        self._decays = _decays(optimizer, self.kind)
        for column in (self._filled, self._level, self._most):
            column.extend([0.0] * (len(self._decays) - len(column)))
            del column[len(self._decays) :]

    def add_step(self, gain: float) -> tuple[float, ...]:
        """Add an optimiser step with a gradient of that gain; returns r of this step, by group."""
        for group, decay in enumerate(self._decays):
            kept, new = (1.0, 1.0) if self.kind == "adagrad" else (decay, 1.0 - decay)
            self._level[group] = kept * self._level[group] + new / gain
            self._filled[group] = kept * self._filled[group] + new
            self._most[group] = max(self._most[group], self._level[group])
        return self.ratios

    def credit(self, worth: float) -> None:
        """Add the worth of the last step, in steps at M0, to the reference; only AdaGrad's needs it."""
        if self.kind == "adagrad":
            self._filled = [max(filled + worth - 1.0, 1e-9) for filled in self._filled]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The present r, by group; 1 before the first step."""
        levels = self._most if self.kind == "amsgrad" else self._level
        return tuple(
            level / filled if level > 0.0 and filled > 0.0 else 1.0
            for level, filled in zip(levels, self._filled, strict=True)
        )

    def final_ratios(self, gain: float) -> tuple[float, ...]:
        """The ratio r towards which steps of that gain move.

        AdaGrad and AMSGrad never forget, so they keep the present r.
        """
        return (1.0 / gain,) * len(self._decays) if self.kind in _FORGETFUL else self.ratios

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        columns = {"decays": self._decays, "level": self._level, "filled": self._filled, "most": self._most}
        return {"kind": self.kind, **{name: list(column) for name, column in columns.items()}}

    @classmethod
    def restored(cls, state: Mapping[str, Any] | None) -> SecondMoments | None:
        """The model of a `state_dict`; None for None."""
        if state is None:
            return None
        moments = cls(str(state["kind"]), [float(decay) for decay in state["decays"]])
        moments._level = [float(value) for value in state["level"]]
        moments._filled = [float(value) for value in state["filled"]]
        moments._most = [float(value) for value in state["most"]]
        return moments


def _decays(optimizer: GroupedOptimizer, kind: str) -> list[float]:
    return [_decay(group.get(_DECAYS.get(kind, ""))) for group in optimizer.param_groups]


def _decay(option: Any) -> float:
    value = option[1] if isinstance(option, tuple | list) else option
    device = getattr(getattr(value, "device", None), "type", "cpu")
    if value is None or device != "cpu":
        # Reading a tensor on a GPU would wait for the device at every step.
        return _DEFAULT_DECAY
    decay = float(value)
    return decay if math.isfinite(decay) and 0.0 <= decay < 1.0 else _DEFAULT_DECAY
