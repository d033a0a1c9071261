"""Times of optimiser steps by placement, local batch and GPU type: the rows that the throughput model is fitted to.

`background_fit` fits, `step_clock` takes the times.
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

__all__ = ["Profile", "ProfileKey"]

_VERSION = 1
_WINDOW = 64
_WARM_UP = 2
_MAX_KEYS = 128
# In steps of one key: long enough to average well, short enough to follow a machine that slows down.
_HALF_LIFE = 32.0
# In steps of the job, between keys; an old measurement at another size is better than none.
_KEY_HALF_LIFE = 2000.0
_LEAST_RECENCY = 0.02
_TRIMMED = 0.25
_FULL_TRUST = 4.0


@dataclass(frozen=True, slots=True, order=True)
class ProfileKey:
    """The placement and the size of a step.

    `local_batch` is the mean number of samples of one replica in one micro-step, total / (K·repeats), maybe a fraction.
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
class _Step:
    compute: float | None
    step: float
    data: float
    repeats: int


@dataclass(slots=True)
class _Window:
    """The last steps at one key; the next `to_skip` are warm-up."""

    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    to_skip: int = _WARM_UP
    touched: int = 0

    def centre(self, values: Sequence[float | None]) -> float | None:
        """The recency-weighted midmean of the values that are not None; None where there are none."""
        last = len(values) - 1
        pairs = [
            (value, math.exp2((index - last) / _HALF_LIFE)) for index, value in enumerate(values) if value is not None
        ]
        return _midmean(pairs) if pairs else None

    def compute(self, alone: bool) -> float | None:
        """T_grad as timed; else, for one replica, the time per micro-step, since nothing is synchronised."""
        told = self.centre([step.compute for step in self.steps])
        if told is None and alone:
            return self.centre([step.step / step.repeats for step in self.steps])
        return told


class Profile:
    """Times of the last steps by key, robust to outliers and recency-weighted; memory is bounded.

    A key has its last 64 steps; a row is their midmean (the mean of the middle half of the weight, which halves every
    32 steps of that key). The first 2 steps of a key are dropped as warm-up, again after a restart. The 128 keys used
    last are kept. The weight of a row falls while its key does not run: to half in 2000 steps, to 0.02 at least.
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
        """Add one optimiser step of `repeats` micro-steps.

        `compute_seconds` is forward and backward of one micro-step without synchronisation, None where that was not
        timed; `step_seconds` is the whole step, `data_seconds` the host's wait for data in it. Times that are not
        finite or not positive are left out, since clocks err.
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

    def observations(self, gpu_type: str) -> list[Observation]:
        """One row per key of this GPU type, in order of the keys, for `pollux.goodput.fit`.

        Where T_grad was not timed it is that of the same local batch at other placements; else it comes from a line
        through the other local batches; else it is the step time, as if there were no synchronisation.
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
        """The profile as plain values for JSON."""
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
        """Restore a state; every key warms up again, since this process has just started."""
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
        """The recency of a key, times a trust that grows with its number of steps."""
        recency = max(math.exp2((window.touched - self._clock) / _KEY_HALF_LIFE), _LEAST_RECENCY)
        count = len(window.steps)
        return recency * count / (count + _FULL_TRUST)

    def _compute_seconds(self, key: ProfileKey, window: _Window) -> float:
        """T_grad at this key: its own, or one from other keys of the same GPU type."""
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
    """A step at s = 0: a step's time without its s unsynchronised micro-steps; never below T_grad."""
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

    The mean of equal local batches, else the least-squares line. With one local batch alone half of its time is assumed
    to be constant, as in the fit, Eq. (G22).
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
