"""Sums the mean loss of steps on the device, and reads the sum without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from pollux.agent.step.deferred_copy import DeferredCopy

__all__ = ["LossSum"]


class LossSum:
    """The sum of this replica's shares of the mean losses of steps; once not finite, it stays so."""

    def __init__(self, device: torch.device) -> None:
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self._sum = torch.zeros((), dtype=dtype, device=device)
        self._num_steps = 0
        self._on_its_way: DeferredCopy[int] = DeferredCopy()

    def add(self, value: Tensor, share: float = 1.0) -> None:
        """Add share·value; the shares of a step's parts sum to 1 over all replicas."""
        self._sum.add_(value.detach().reshape(()).to(self._sum.dtype), alpha=share)

    def count_step(self) -> None:
        """Count a step, whose losses have been added."""
        self._num_steps += 1

    def read(self) -> tuple[float, int]:
        """The sum and the number of steps since the last call; on a GPU those of one call earlier."""
        arrived = self._on_its_way.exchange(self._sum, self._num_steps)
        self._sum.zero_()
        self._num_steps = 0
        return (float(arrived[0]), arrived[1]) if arrived is not None else (0.0, 0)

    def forget(self) -> None:
        """Drop the losses so far, and those on their way to the host."""
        self._sum.zero_()
        self._num_steps = 0
        self._on_its_way.forget()
