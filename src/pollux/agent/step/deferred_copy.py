"""Copies numbers from the device without waiting for it: they are sent now and read one round later."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["DeferredCopy"]

Beside = TypeVar("Beside")


class DeferredCopy(Generic[Beside]):
    """A tensor on its way to the host, and a value that belongs to it.

    On a GPU `exchange` starts a copy and returns the one that the last call started, which has arrived; elsewhere it
    returns a copy of what it was passed. The caller may write to the tensor as soon as it returns.
    """

    def __init__(self) -> None:
        self._on_its_way: tuple[Tensor, torch.cuda.Event, Beside] | None = None

    def exchange(self, values: Tensor, beside: Beside) -> tuple[Tensor, Beside] | None:
        """Send a tensor to the host, and return the one that the call before sent; None where there is none."""
        if not values.is_cuda:
            return values.detach().clone(), beside
        arrived = self.wait()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(values.device))
        self._on_its_way = host, event, beside
        return arrived

    def wait(self) -> tuple[Tensor, Beside] | None:
        """Wait for the tensor on its way, and return it; None where there is none."""
        if self._on_its_way is None:
            return None
        host, event, beside = self._on_its_way
        self._on_its_way = None
        event.synchronize()
        return host, beside

    def forget(self) -> None:
        """Drop the tensor on its way."""
        self._on_its_way = None
