"""Out-of-memory at a batch that was not tried before: caught, learned and survived.

On a trial step the model's forward pass and our backward pass catch the error; all replicas then agree that the
step did not happen. How large a batch may be tried at all is predicted from the memory of the steps before.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from pollux.core.errors import InvalidInput

__all__ = ["MemoryLimits", "OomTrial", "free_memory", "is_out_of_memory"]

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


class MemoryLimits:
    """Largest local batch that ran, and smallest that did not, by GPU type.

    `held` is what memory held so far (0: nothing yet), `burst` the smallest local batch that ran out of memory.
    """

    def __init__(self, gpu_type: str) -> None:
        self.gpu_type = gpu_type
        self._held: dict[str, int] = {}
        self._burst: dict[str, int] = {}

    @property
    def held(self) -> int:
        """The largest local batch that a whole step ran with on this GPU type; 0 before the first."""
        return self._held.get(self.gpu_type, 0)

    @property
    def largest(self) -> int | None:
        """The largest local batch worth trying on this GPU type; None where nothing is known."""
        burst = self._burst.get(self.gpu_type)
        return None if burst is None else max(burst - 1, 1)

    def ran(self, local_batch: int) -> None:
        """A whole step ran with this local batch."""
        if local_batch > self.held:
            self._held[self.gpu_type] = local_batch

    def ran_out(self, local_batch: int) -> int:
        """This local batch was too large; returns the one to go back to."""
        self._burst[self.gpu_type] = min(self._burst.get(self.gpu_type, local_batch), local_batch)
        fitting = self.held if self.held < local_batch else 0
        if fitting == 0:
            self._held.pop(self.gpu_type, None)
        return fitting or max(local_batch // 2, 1)

    def limit(self, largest: int) -> bool:
        """An earlier start died above `largest`: never again; returns whether that was not known yet."""
        is_new = self.largest is None or self.largest > largest
        if is_new:
            self._burst[self.gpu_type] = largest + 1
        if self.held > largest:
            self._held[self.gpu_type] = largest
        return is_new

    def predicted_largest(self, device: torch.device, local_batch: int) -> int | None:
        """What the device should hold: memory beyond what stays grows in proportion to the local batch.

        None without a GPU. Reads counters only.
        """
        if device.type != "cuda" or local_batch < 1:
            return None
        stays = torch.cuda.memory_allocated(device)
        grows = torch.cuda.max_memory_allocated(device) - stays
        room = _HEADROOM * torch.cuda.get_device_properties(device).total_memory - stays
        return max(local_batch, int(room / grows * local_batch)) if grows > 0 else None

    def state_dict(self) -> dict[str, dict[str, int]]:
        """Plain values, by GPU type."""
        return {"held": dict(self._held), "burst": dict(self._burst)}

    def load_state_dict(self, state: dict[str, dict[str, int]]) -> None:
        """Take up what an earlier run learned."""
        self._held = {str(key): int(value) for key, value in state["held"].items()}
        self._burst = {str(key): int(value) for key, value in state["burst"].items()}


class OomTrial:
    """A step at a local batch that memory may not hold.

    While it lasts, a forward pass that runs out of memory gives its output without a graph, computed in smaller
    pieces, so that the user's loss still has a value; `failed` then says that nothing must be learned from it.
    """

    def __init__(self, model: nn.Module, safe_batch: int) -> None:
        self.failed = False
        self._model = model
        self._safe = max(safe_batch, 1)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Catch in the model's forward pass until the end of the block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Put the guard in front of the model's forward pass."""
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
            # Outside the handler: the traceback would keep the activations alive.
            self.fail()
            return self._in_pieces(original, inputs, named)

        self._own = own
        self._model.forward = guarded

    def stop(self) -> None:
        """Take the guard away again."""
        if "forward" in vars(self._model):
            del self._model.forward
        if self._own is not None:
            self._model.forward = self._own

    def fail(self) -> None:
        """This replica ran out of memory."""
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
        # Backward from this loss is never run, but a user's own checks may ask whether it could be.
        leaves.append(value.requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value)
    return _pytree.tree_unflatten(leaves, shape)


def free_memory() -> None:
    """Give back what can be given back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
