"""What optimiser steps cost, by placement, local batch and GPU type: the rows that a throughput model is fitted to.

The fit itself is in `background_fit`, the clock in `step_clock`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pollux.agent.adaptation.state_version import require_version
from pollux.core.errors import InvalidInput
from pollux.goodput import Observation

__all__ = ["Profile", "ProfileKey", "StepCost"]

_VERSION = 1
_WINDOW = 64
_WARM_UP = 2
_MAX_KEYS = 128
# Within a key, in steps of that key: old enough to average well, young enough to follow a machine that slows.
_HALF_LIFE = 32.0
# Between keys, in steps of the job; what was seen at another size long ago stays better than nothing.
_KEY_HALF_LIFE = 2000.0
_LEAST_RECENCY = 0.02
_TRIMMED = 0.25
_FULL_TRUST = 4.0


@dataclass(frozen=True, slots=True, order=True)
class ProfileKey:
    """Where and at what size a step ran.

    `local_batch` is the mean number of samples of one replica in one micro-step, total / (K·repeats), and need
    not be whole.
    """

    num_nodes: int
    num_replicas: int
    local_batch: float
    gpu_type: str

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_replicas:
            raise InvalidInput(f"num_nodes is {self.num_nodes}: give 1 to num_replicas ({self.num_replicas})")
        if not (math.isfinite(self.local_batch) and self.local_batch > 0):
            raise InvalidInput(f"local_batch is {self.local_batch}: give a finite number of samples above 0")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Robust means of one key, in seconds.

    `compute_seconds` is T_grad of one micro-step, None where it was not told apart. `step_seconds` is a step
    without accumulation, T_iter at s = 0 of Eq. (G6), and holds the waiting for data that no computation hid:
    like computing it grows with the local batch. `data_seconds` is how long the host waited for data in a
    step. `count` steps are behind them.
    """

    compute_seconds: float | None
    step_seconds: float
    data_seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class _Step:
    compute: float | None
    step: float
    data: float
    repeats: int


@dataclass(slots=True)
class _Window:
    """The last steps at one key; `to_skip` more are warm-up."""

    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    to_skip: int = _WARM_UP
    touched: int = 0

    def centre(self, values: Sequence[float | None]) -> float | None:
        """The recency-weighted midmean of what is there of one value per step; None where nothing is."""
        last = len(values) - 1
        pairs = [
            (value, math.exp2((index - last) / _HALF_LIFE)) for index, value in enumerate(values) if value is not None
        ]
        return _midmean(pairs) if pairs else None

    def compute(self, alone: bool) -> float | None:
        """T_grad: as told apart, or, for one replica, a step's share of it, since nothing is synchronised."""
        told = self.centre([step.compute for step in self.steps])
        if told is None and alone:
            return self.centre([step.step / step.repeats for step in self.steps])
        return told


class Profile:
    """Times of the last steps by key, robust to outliers and recency-weighted; memory is bounded.

    A key holds its last 64 steps and gives their midmean (the mean of the middle half of the weight, which
    halves every 32 steps of that key). The first 2 steps of a key are dropped as warm-up, again after
    `restarted`. The 128 keys used last are kept. Rows count less the longer their key was not run: half after
    2000 steps of the job, but never below 0.02.
    """

    def __init__(self) -> None:
        self._windows: dict[ProfileKey, _Window] = {}
        self._clock = 0

    @property
    def keys(self) -> tuple[ProfileKey, ...]:
        """The keys with at least one step, in order."""
        return tuple(sorted(key for key, window in self._windows.items() if window.steps))

    def add(
        self,
        key: ProfileKey,
        *,
        compute_seconds: float | None,
        step_seconds: float,
        data_seconds: float,
        repeats: int,
    ) -> None:
        """Take in one optimiser step of `repeats` micro-steps.

        `compute_seconds` is forward and backward of one micro-step without synchronisation, None where that
        was not told apart; `step_seconds` is the whole step, `data_seconds` how long the host waited for data
        in it. Times that are not finite or not positive are left out: a clock can err, training goes on.
        """
        if repeats < 1:
            raise InvalidInput(f"repeats is {repeats}: give the number of micro-steps, 1 or more")
        if not _is_time(step_seconds):
            return
        self._clock += 1
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window()
        window.touched = self._clock
        self._forget_the_oldest()
        if window.to_skip > 0:
            window.to_skip -= 1
            return
        compute = compute_seconds if compute_seconds is not None and _is_time(compute_seconds) else None
        data = data_seconds if _is_time(data_seconds) else 0.0
        window.steps.append(_Step(compute, step_seconds, data, repeats))

    def restarted(self) -> None:
        """Say that processes, group or device are new, so that every key warms up again."""
        for window in self._windows.values():
            window.to_skip = _WARM_UP

    def cost(self, key: ProfileKey) -> StepCost | None:
        """What a step at this key costs; None where none was seen."""
        window = self._windows.get(key)
        if window is None or not window.steps:
            return None
        compute = self._compute_seconds(key, window)
        own = window.compute(key.num_replicas == 1)
        data = window.centre([step.data for step in window.steps])
        return StepCost(own, _base_step(window, compute), data or 0.0, len(window.steps))

    def observations(self, gpu_type: str) -> list[Observation]:
        """One row per key of this GPU type, in order of the keys, for `pollux.goodput.fit`.

        Where T_grad was not told apart it is that of the same local batch elsewhere, else read off a line
        through the other local batches, else the step time, which is the optimistic reading: no synchronisation.
        """
        rows = []
        for key in self.keys:
            if key.gpu_type != gpu_type:
                continue
            window = self._windows[key]
            compute = self._compute_seconds(key, window)
            step = _base_step(window, compute)
            weight = self._weight(window)
            local_batch = float(key.local_batch)
            rows.append(Observation(key.num_nodes, key.num_replicas, local_batch, min(compute, step), step, weight))
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Everything kept, as plain values for JSON."""
        keys = [
            {
                "num_nodes": key.num_nodes,
                "num_replicas": key.num_replicas,
                "local_batch": key.local_batch,
                "gpu_type": key.gpu_type,
                "touched": window.touched,
                "steps": [[step.compute, step.step, step.data, step.repeats] for step in window.steps],
            }
            for key, window in self._windows.items()
        ]
        return {"version": _VERSION, "clock": self._clock, "keys": keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; every key warms up again, since this process has just started."""
        require_version("the throughput profile", state, _VERSION)
        self._clock = int(state["clock"])
        self._windows = {}
        for entry in state["keys"]:
            key = ProfileKey(entry["num_nodes"], entry["num_replicas"], entry["local_batch"], entry["gpu_type"])
            window = self._windows[key] = _Window(touched=int(entry["touched"]))
            window.steps.extend(_Step(compute, step, data, repeats) for compute, step, data, repeats in entry["steps"])

    def _forget_the_oldest(self) -> None:
        if len(self._windows) > _MAX_KEYS:
            del self._windows[min(self._windows, key=lambda key: self._windows[key].touched)]

    def _weight(self, window: _Window) -> float:
        """Recency between keys, times a trust that grows with the number of steps."""
        recency = max(math.exp2((window.touched - self._clock) / _KEY_HALF_LIFE), _LEAST_RECENCY)
        count = len(window.steps)
        return recency * count / (count + _FULL_TRUST)

    def _compute_seconds(self, key: ProfileKey, window: _Window) -> float:
        """T_grad at this key: its own, or that of the same GPU type at other counts and sizes."""
        own = window.compute(key.num_replicas == 1)
        if own is not None:
            return own
        known = [
            (other.local_batch, compute)
            for other, steps in self._windows.items()
            if other.gpu_type == key.gpu_type and (compute := steps.compute(other.num_replicas == 1)) is not None
        ]
        shared = window.centre([step.step / step.repeats for step in window.steps]) or 0.0
        return min(_read_off(known, key.local_batch), shared)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0.0


def _base_step(window: _Window, compute: float) -> float:
    """The step at s = 0: what is left of each step without its s unsynchronised micro-steps; never below T_grad."""
    base = window.centre([step.step - (step.repeats - 1) * compute for step in window.steps])
    return max(base or 0.0, compute)


def _midmean(pairs: Iterable[tuple[float, float]]) -> float:
    """The weighted mean of the values between the first and the third quartile of the weight."""
    ordered = sorted(pairs)
    whole = sum(weight for _, weight in ordered)
    low, high = _TRIMMED * whole, (1.0 - _TRIMMED) * whole
    total = used = seen = 0.0
    for value, weight in ordered:
        inside = max(min(seen + weight, high) - max(seen, low), 0.0)
        seen += weight
        used += inside
        total += inside * value
    return total / used


def _read_off(known: Sequence[tuple[float, float]], local_batch: float) -> float:
    """T_grad at a local batch from (local batch, T_grad) pairs; infinite where there is none.

    The mean of equal local batches, else the least-squares line. With one local batch alone half of its time is
    taken to be constant, as the fit does by Eq. (G22).
    """
    equal = [seconds for size, seconds in known if math.isclose(size, local_batch)]
    if equal:
        return sum(equal) / len(equal)
    if not known:
        return math.inf
    size = sum(size for size, _ in known) / len(known)
    seconds = sum(seconds for _, seconds in known) / len(known)
    spread = sum((other - size) ** 2 for other, _ in known)
    slope = 0.5 * seconds / size
    if spread > 0.0:
        slope = max(sum((other - size) * (value - seconds) for other, value in known) / spread, 0.0)
    return max(seconds + slope * (local_batch - size), min(value for _, value in known) * 0.1)
