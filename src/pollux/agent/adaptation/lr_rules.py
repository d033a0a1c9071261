"""How the learning rate follows the batch: one factor for each parameter group. `progress` has the schedules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.core.errors import InvalidInput, UnknownName

__all__ = ["OwnRule", "Rule", "create", "default_rule", "names", "scaled_rates"]

OwnRule: TypeAlias = Callable[[float, float, int], float]


class Rule(Protocol):
    """Scales learning rates for a total batch of S·M0."""

    @property
    def name(self) -> str:
        """The name of the rule; "own" for a user's function."""

    def factors(self, scale: float, estimate: NoiseEstimate, progress: float) -> tuple[float, ...]:
        """The factor of each parameter group's learning rate; exactly 1 at scale 1, else finite and above 0.

        `scale` is S = M/M0; `progress` has the unit of the warm-up.
        """


class _HasDefaults(Protocol):
    @property
    def defaults(self) -> Mapping[str, Any]: ...


_Law: TypeAlias = Callable[[float, NoiseEstimate, int, float, float], float]


def _adascale(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
    """gain(S) = (var + sqr)/(var/S + sqr) of the group, Eq. (G9): between 1 and S."""
    return estimate.gain(scale, group)


def _sqrt(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
    return math.sqrt(scale)


def _linear(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
    return scale


def _legw(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
    """√S, with a linear warm-up of length w stretched to w·S.

    The schedule itself has the factor min(1, p/w), so this rule multiplies by min(1, p/(w·S))/min(1, p/w).
    """
    if warmup <= 0.0:
        return math.sqrt(scale)
    stretched, plain = progress / (warmup * scale), progress / warmup
    ramp = 1.0 / scale if max(stretched, plain) <= 1.0 else min(1.0, stretched) / min(1.0, plain)
    return math.sqrt(scale) * ramp


def _none(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
    return 1.0


_LAWS: dict[str, _Law] = {"adascale": _adascale, "legw": _legw, "linear": _linear, "none": _none, "sqrt": _sqrt}


@dataclass(frozen=True, slots=True)
class _LawRule:
    name: str
    law: _Law
    warmup: float

    def factors(self, scale: float, estimate: NoiseEstimate, progress: float) -> tuple[float, ...]:
        if not (math.isfinite(scale) and scale > 0.0):
            raise InvalidInput(f"scale is {scale}: give total batch over initial batch, above 0")
        groups = range(len(estimate.group_sqr))
        if scale == 1.0:
            return tuple(1.0 for _ in groups)
        return tuple(self._factor(scale, estimate, group, progress) for group in groups)

    def _factor(self, scale: float, estimate: NoiseEstimate, group: int, progress: float) -> float:
        value = self.law(scale, estimate, group, progress, self.warmup)
        try:
            factor = float(value)
        except (TypeError, ValueError):
            factor = math.nan
        if not (math.isfinite(factor) and factor > 0.0):
            raise InvalidInput(
                f"learning-rate rule '{self.name}' gave {value!r} for parameter group {group} at scale {scale:g}: "
                "a factor must be a finite number above 0"
            )
        return factor


def names() -> tuple[str, ...]:
    """The rules that have a name, sorted."""
    return tuple(sorted(_LAWS))


def create(rule: str | OwnRule, *, warmup: float = 0.0) -> Rule:
    """The rule of that name, or the user's own `f(scale, gain, group_index) -> factor`.

    - `adascale`: the gain by the group's own noise where that is known, else by that of all groups; cautious where
      neither is known
    - `sqrt`: √S; `linear`: S; `none`: 1
    - `legw`: √S with a longer warm-up. `warmup` is the length of the schedule's linear warm-up at M0, in the unit of
      the `progress` of `factors`; the other rules do not use it.
    """
    if not (math.isfinite(warmup) and warmup >= 0.0):
        raise InvalidInput(f"warmup is {warmup}: give the length of the schedule's warm-up in progress, 0 or more")
    if isinstance(rule, str):
        if rule not in _LAWS:
            raise UnknownName("learning-rate rule", rule, _LAWS)
        return _LawRule(rule, _LAWS[rule], warmup)
    if not callable(rule):
        raise InvalidInput(
            f"learning-rate rule is {rule!r}: give one of {', '.join(names())}, or a function "
            "f(scale, gain, group_index) that returns a factor"
        )
    own = rule

    def law(scale: float, estimate: NoiseEstimate, group: int, progress: float, warmup: float) -> float:
        return own(scale, estimate.gain(scale, group), group)

    return _LawRule("own", law, warmup)


def default_rule(optimizer: _HasDefaults) -> str:
    """`sqrt` for optimisers that normalise their steps (Adam and its kin, AdaGrad, RMSprop, Lion), else `adascale`.

    An optimiser that normalises has the option `betas` or `eps`; plain and momentum SGD have neither.
    """
    return "sqrt" if {"betas", "eps"} & set(optimizer.defaults) else "adascale"


@contextlib.contextmanager
def scaled_rates(groups: Sequence[MutableMapping[str, Any]], factors: Sequence[float]) -> Iterator[None]:
    """Multiply each parameter group's learning rate for one optimiser step, and restore the base rates after it.

    So schedules and logs see the base rates only.
    """
    if all(factor == 1.0 for factor in factors):
        yield
        return
    base = [group["lr"] for group in groups]
    for group, factor in zip(groups, factors, strict=True):
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, base, strict=True):
            group["lr"] = rate
