"""Survives running out of memory in the first step at a larger local batch, a trial.

In a trial the model's forward pass and our backward pass catch the error, and all replicas then drop the step. The
memory of earlier steps predicts how large a batch is worth a trial.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pollux.core.errors import InvalidInput

__all__ = ["OomTrial", "free_memory", "is_out_of_memory", "predicted_local_batch"]

_log = logging.getLogger("pollux")
_HEADROOM = 0.92


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the host's allocator, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def predicted_local_batch(device: torch.device, local_batch: int) -> int | None:
    """The largest local batch that the device should hold, if the memory of a step grows in proportion to it.

    `local_batch` is the present one. None without a GPU. Reads counters only.
    """
    if device.type != "cuda" or local_batch < 1:
        return None
    stays = torch.cuda.memory_allocated(device)
    grows = torch.cuda.max_memory_allocated(device) - stays
    room = _HEADROOM * torch.cuda.get_device_properties(device).total_memory - stays
    return max(local_batch, int(room / grows * local_batch)) if grows > 0 else None


class OomTrial:
    """A step at a local batch that memory may not hold.

    Meanwhile a forward pass that runs out of memory returns its output without a graph, computed in smaller pieces, so
    that the user's loss has a value; `failed` then says that the step must not be taken.
    """

    def __init__(self, model: nn.Module, safe_batch: int) -> None:
        self.failed = False
        self._model = model
        self._safe = max(safe_batch, 1)

    def start(self) -> None:
        """Guard the model's forward pass."""
        own = vars(self._model).get("forward")
        original: Callable[..., Any] = self._model.forward

        def guarded(*inputs: Any, **named: Any) -> Any:
            if self.failed:
                return self._in_pieces(original, inputs, named)
            try:
                return original(*inputs, **named)
            except Exception as error:
                if not (torch.is_grad_enabled() and is_out_of_memory(error)):
                    raise
            # Outside of the handler, whose traceback would keep the activations alive.
            self.fail()
            return self._in_pieces(original, inputs, named)

        self._own = own
        self._model.forward = guarded

    def stop(self) -> None:
        """Remove the guard."""
        if "forward" in vars(self._model):
            del self._model.forward
        if self._own is not None:
            self._model.forward = self._own

    def fail(self) -> None:
        """Note that this replica ran out of memory, and free what can be freed."""
        self.failed = True
        free_memory()

    def _in_pieces(self, forward: Callable[..., Any], inputs: Any, named: Any) -> Any:
        leaves, shape = _pytree.tree_flatten((inputs, named))
        sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
        size = max(sizes, default=0)
        outputs = []
        with torch.no_grad():
            for first in range(0, size, self._safe):
                piece = [
                    leaf[first : first + self._safe]
                    if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
                    else leaf
                    for leaf in leaves
                ]
                arguments, keywords = _pytree.tree_unflatten(piece, shape)
                outputs.append(_required(forward, arguments, keywords, self._safe))
        return _joined(outputs)


def _required(forward: Callable[..., Any], arguments: Any, keywords: Any, size: int) -> Any:
    try:
        return forward(*arguments, **keywords)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InvalidInput(
            f"memory does not hold {size} sample{'s' * (size > 1)} even without gradients: use a smaller model, or a "
            "GPU with more memory"
        ) from error


def _joined(outputs: list[Any]) -> Any:
    flat = [_pytree.tree_flatten(output) for output in outputs]
    shape = flat[0][1]
    leaves = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        first = parts[0]
        together = isinstance(first, Tensor) and first.dim() > 0
        value = torch.cat(parts) if together else first
        # There is no backward pass from this loss, but the user's own checks may ask whether it requires a gradient.
        leaves.append(value.requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value)
    return _pytree.tree_unflatten(leaves, shape)


def free_memory() -> None:
    """Free the memory that can be freed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
