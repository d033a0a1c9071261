"""The steps of a loop that a PyTorch framework owns: weights, gradient noise, times, learning rates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pollux.agent.adaptation.lr_rules import scaled_rates
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_sum import LossSum
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.step.oom import predicted_local_batch
from pollux.agent.step.step_clock import StepClock
from pollux.core.errors import MisusedJob

__all__ = ["FrameworkSteps"]


class FrameworkSteps:
    """The calls around the backward passes and the optimiser of a framework's step.

    Hooks of the optimiser multiply the learning rates just before it steps and restore them just after it, so that
    schedules and logs see the base rates. `micro` is the present micro-batch, None for none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device: torch.device, weighting: LossWeighting, measures: bool
    ) -> None:
        self.optimizer = optimizer
        self.meter = GradientNormMeter(optimizer, device) if measures else None
        self.micro: MicroBatch | None = None
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.clock = StepClock(device, self._parameters)
        self._weighting = weighting
        self._losses = LossSum(device)
        self._device = device
        self._factors: Sequence[float] = ()
        self._scaled = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._scale_rates),
            optimizer.register_step_post_hook(self._restore_rates),
        ]

    def _scale_rates(self, *_: object) -> None:
        # A step that failed before its post hook has left the rates scaled.
        self._scaled.close()
        groups = self.optimizer.param_groups
        if len(self._factors) == len(groups):
            self._scaled.enter_context(scaled_rates(groups, self._factors))

    def _restore_rates(self, *_: object) -> None:
        self._scaled.close()

    def begin_micro_batch(self, micro: MicroBatch, factors: Sequence[float] | None) -> None:
        """Start a micro-batch; the first one of a step comes with the `factors` of the learning rates."""
        self.micro = micro
        if factors is not None:
            self._factors = factors
        self.clock.begin_micro()

    def end_step(self) -> MicroBatch:
        """End the step after the optimiser; returns its last micro-batch."""
        micro, self.micro = self._current(), None
        self._losses.count_step()
        return micro

    def _current(self) -> MicroBatch:
        if self.micro is None:
            raise MisusedJob("a backward pass or an optimiser step came without a batch of Pollux's loader before it")
        return self.micro

    def weight(self, like: Tensor, weight: float | Tensor | None = None) -> Tensor:
        """The factor of this batch's mean loss, so that the mean over replicas is that of the whole step.

        `weight` is the number of tokens or other units over which the loss is the mean; None: samples.
        """
        one = torch.ones((), dtype=like.dtype, device=like.device)
        return self._weighting.scale(one, self._current(), "mean", weight)

    def note_loss(self, loss: Tensor) -> None:
        """Add this batch's mean loss."""
        micro = self._current()
        if micro.samples:
            self._losses.add(loss, micro.samples / micro.total)

    def note_share(self, share: Tensor) -> None:
        """Add this batch's share of the mean loss of its step."""
        self._losses.add(share)

    def begin_backward(self, weight: float | Tensor | None = None, part: float | None = None) -> None:
        """In a measured step, start to measure; `part` is the meter's weight, None: derived from `weight`."""
        micro = self._current()
        if self.meter is not None and micro.measured:
            self.meter.start_measuring(self._weighting.noise_factors(micro, weight).part if part is None else part)

    def end_backward(self) -> None:
        """End the micro-batch after its backward pass."""
        if self.meter is not None and self.meter.is_measuring:
            self.meter.stop_measuring()
        self.clock.end_micro()

    def before_step(self, loss_scale: Tensor | None = None, *, unscaled: bool = False) -> None:
        """Measure the averaged gradients, before clipping; `unscaled`: the loss scale is removed already."""
        micro = self._current()
        weights = self._weighting.finish(self._parameters)
        if self.meter is None or not micro.measured:
            return
        parts: float | Tensor = 1.0 if weights is None else 1.0 / weights
        if unscaled and loss_scale is not None:
            parts, loss_scale = parts / loss_scale.double().square(), None
        self.meter.close_row(None, micro.total, loss_scale=loss_scale, parts_factor=parts)

    def refresh(self) -> None:
        """Read the optimiser's state again, after it was restored."""
        if self.meter is not None:
            self.meter.refresh()

    def losses(self) -> tuple[float, int]:
        """Sum of this replica's shares of the mean loss, and the steps, since the last call; on a GPU one call late."""
        return self._losses.read()

    def predicted_local_batch(self, local_batch: int) -> int | None:
        """The largest local batch that the device's memory should hold; None: not known."""
        return predicted_local_batch(self._device, local_batch)

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        if self.meter is not None:
            self.meter.close()
