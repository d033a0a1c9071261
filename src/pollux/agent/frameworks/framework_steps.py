"""For a framework's training loop: what a user may choose about the batch, and one optimiser's steps as measured.

The order of a training is in `framework_loop`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
from torch.utils.hooks import RemovableHandle

from pollux.agent.adaptation import lr_rules
from pollux.agent.adaptation.adaptation import BatchRange
from pollux.agent.adaptation.lr_rules import OwnRule
from pollux.agent.environment import Environment
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.agent.step.loss_sum import LossSum
from pollux.agent.step.oom import predicted_local_batch
from pollux.agent.step.step_clock import StepClock
from pollux.core.errors import InvalidInput

__all__ = ["FrameworkOptions", "FrameworkSteps"]


@dataclass(frozen=True, slots=True)
class FrameworkOptions:
    """What a user may choose about the batch; the same words and meanings as in `pollux.init`."""

    batch_size: int
    max_batch_size: int | None = None
    max_local_batch: int | None = None
    accumulation: int = 0
    lr_rule: str | OwnRule | None = None
    warmup_epochs: float = 0.0
    measure_noise: bool | None = None
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "max_batch_size": 1, "max_local_batch": 1, "accumulation": 0, "epoch_size": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name != "batch_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidInput(f"{name} is {value!r}: give a whole number, {lowest} or more")
        if self.max_batch_size is not None and self.max_batch_size < self.batch_size:
            raise InvalidInput(
                f"batch_size is {self.batch_size}, above max_batch_size {self.max_batch_size}: raise the ceiling or "
                "lower the initial batch"
            )
        lr_rules.create(self.lr_rule if self.lr_rule is not None else "none", warmup=self.warmup_epochs)

    def within(self, environment: Environment, may_grow: bool = True) -> FrameworkOptions:
        """With the limits of whoever started this process, as `pollux.init` takes them; see `Environment.batches`."""
        _, most, local = environment.batches(self.batch_size, self.max_batch_size, self.max_local_batch)
        return replace(self, max_batch_size=most if may_grow else None, max_local_batch=local)

    @property
    def allowed(self) -> BatchRange:
        """The batches that may be run."""
        return BatchRange(self.batch_size, self.max_batch_size, self.max_local_batch, self.accumulation)


class FrameworkSteps:
    """What one optimiser of a framework does, as far as it is measured: noise, times, losses, learning rates.

    The learning rates are multiplied just before the optimiser steps and put back just after it, by hooks of the
    optimiser's own, so that schedules and logs see the base rates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, measures: bool) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.meter = GradientNormMeter(optimizer, device) if measures else None
        self.clock = StepClock(device, self.parameters)
        self.losses_seen = LossSum(device)
        self.factors: tuple[float, ...] = ()
        self._device = device
        self._scaled = contextlib.ExitStack()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._scale_rates),
            optimizer.register_step_post_hook(self._restore_rates),
        ]

    def _scale_rates(self, *_: object) -> None:
        self._scaled.close()
        groups = self.optimizer.param_groups
        if len(self.factors) == len(groups):
            self._scaled.enter_context(lr_rules.scaled_rates(groups, self.factors))

    def _restore_rates(self, *_: object) -> None:
        self._scaled.close()

    def losses(self) -> tuple[float, int]:
        """Sum over steps of this replica's share of the mean loss, and the steps, between two calls; late on a GPU."""
        return self.losses_seen.read()

    def predicted_local_batch(self, local_batch: int) -> int | None:
        """The largest local batch that the device's memory should hold; None: cannot be told."""
        return predicted_local_batch(self._device, local_batch)

    def close(self) -> None:
        """Take every hook off the optimiser."""
        for handle in self._handles:
            handle.remove()
        if self.meter is not None:
            self.meter.close()
