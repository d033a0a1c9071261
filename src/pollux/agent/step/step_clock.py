"""Times steps without waiting for the device: by the host's clock on a CPU, by events in the stream on a GPU.

The events are read later, when the device has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pollux.agent.adaptation.measurements import StepTime

__all__ = ["StepClock"]

_Instant: TypeAlias = "float | torch.cuda.Event"
_MAX_PENDING = 4096


@dataclass(slots=True)
class _Reading:
    began: _Instant
    ended: _Instant | None = None
    data_seconds: float = 0.0
    spans: list[tuple[_Instant, _Instant]] | None = None


class StepClock:
    """Times steps; `drain` returns those that the device has passed.

    `begin_step(told_apart=True)` has the computation of a step timed separately. Where gradients are synchronised
    during the backward pass (`hooks`), temporary hooks note when the last gradient came; otherwise computation ends
    with the backward pass.
    """

    def __init__(self, device: torch.device, parameters: Sequence[nn.Parameter], hooks: bool = True) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._hooks = hooks
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._current: _Reading | None = None
        self._done: list[tuple[_Reading, int, int, bool]] = []
        self._handles: list[RemovableHandle] = []
        self._micro_began: _Instant | None = None
        self._last_gradient: _Instant | None = None
        self._remaining = 0

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Between steps: the parameters that are trained from now on."""
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]

    @property
    def includes_data_wait(self) -> bool:
        """Whether the GPU's stream times the computation: then the times include waits for late data."""
        return self._on_gpu

    def _now(self) -> _Instant:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin_step(self, told_apart: bool) -> None:
        """Start a step, before its first data is read."""
        self._current = _Reading(self._now(), spans=[] if told_apart else None)

    def add_data_wait(self, seconds: float) -> None:
        """Add a wait of the host for data."""
        if self._current is not None:
            self._current.data_seconds += seconds

    def begin_micro(self) -> None:
        """Start a micro-step, before its forward pass."""
        if self._current is None or self._current.spans is None:
            return
        self._micro_began = self._now()
        self._last_gradient = None
        self._remaining = len(self._parameters)
        if self._hooks:
            self._handles = [parameter.register_hook(self._on_gradient) for parameter in self._parameters]

    def mark_computed(self) -> None:
        """Note that the backward pass has returned."""
        if not self._hooks and self._micro_began is not None:
            self._last_gradient = self._now()

    def _on_gradient(self, gradient: Tensor) -> None:
        # On a GPU only the last gradient matters, and each event costs a launch.
        self._remaining -= 1
        if not self._on_gpu or self._remaining <= 0:
            self._last_gradient = self._now()

    def end_micro(self) -> None:
        """End a micro-step, after its backward pass."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        current = self._current
        if current is None or current.spans is None or self._micro_began is None:
            return
        if self._last_gradient is not None:
            current.spans.append((self._micro_began, self._last_gradient))
        self._micro_began = None

    def end_step(self, repeats: int, local_batch: int, measured: bool) -> None:
        """End the step: the optimiser has stepped."""
        current, self._current = self._current, None
        if current is None:
            return
        current.ended = self._now()
        self._done.append((current, repeats, local_batch, measured))
        del self._done[:-_MAX_PENDING]

    def cancel_step(self) -> None:
        """Drop the step under way."""
        self.end_micro()
        self._current = None

    def regroup(self, hooks: bool) -> None:
        """Forget the steps so far: the replicas have changed. `hooks` as above."""
        self.cancel_step()
        self._done.clear()
        self._hooks = hooks

    def drain(self) -> list[StepTime]:
        """The steps that ended and that the device has passed, oldest first; each is returned once."""
        times: list[StepTime] = []
        while self._done:
            reading, repeats, local_batch, measured = self._done[0]
            if not self._passed(reading.ended):
                break
            del self._done[0]
            spans = [self._seconds(first, last) for first, last in reading.spans or []]
            compute = sum(spans) / len(spans) if spans else None
            assert reading.ended is not None
            seconds = self._seconds(reading.began, reading.ended)
            times.append(StepTime(seconds, reading.data_seconds, compute, repeats, local_batch, measured))
        return times

    @staticmethod
    def _passed(instant: _Instant | None) -> bool:
        return not isinstance(instant, torch.cuda.Event) or instant.query()

    @staticmethod
    def _seconds(first: _Instant, last: _Instant) -> float:
        if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
            return float(first.elapsed_time(last)) / 1e3
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first
