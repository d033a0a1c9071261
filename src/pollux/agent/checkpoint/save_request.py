"""One save of a checkpoint: its content, and the checks before it is written and published."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pollux.agent.checkpoint.agreement import Outcome
from pollux.agent.checkpoint.host_buffers import Abandoned, StagedState, pickled
from pollux.agent.checkpoint.manifest import Manifest
from pollux.core.errors import InvalidInput, NonFiniteValue

__all__ = ["SaveRequest", "check_pickling", "pickled_objects"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One save: its manifest without the files, and the copied state, or the error of copying.

    `finite` names the tensors whose values must all be finite, `abandoned` is set when the save is to stop, `began` is
    the time of the request. `insists`: the caller waits, so a failed write is tried again a little later.
    """

    manifest: Manifest
    staged: Outcome[StagedState]
    finite: frozenset[str]
    abandoned: threading.Event
    began: float
    insists: bool

    def proceed(self) -> None:
        """Raise `Abandoned` where the save is to stop."""
        if self.abandoned.is_set():
            raise Abandoned

    def require_finite(self) -> None:
        """Raise `NonFiniteValue` naming the first tensor that must be finite and is not."""
        state = self.staged.get()
        wanted = {state.tied.get(name, name) for name in self.finite}
        for name, staged in state.tensors.items():
            host = staged.host
            if name not in wanted or not (host.is_floating_point() or host.is_complex()):
                continue
            # Types of one byte have no isfinite.
            if not bool(torch.isfinite(host.float() if host.itemsize == 1 else host).all()):
                raise NonFiniteValue(
                    f"{name} has values that are NaN or infinite; lower the learning rate or clip gradients"
                )


def pickled_objects(objects: Mapping[str, object]) -> dict[str, bytes]:
    """The objects as bytes; `InvalidInput` names the first that cannot be pickled."""
    return {name: _pickling(name, value, pickled) for name, value in objects.items()}


def check_pickling(objects: Mapping[str, object]) -> None:
    """Raise `InvalidInput` naming the first object that cannot be pickled."""
    for name, value in objects.items():
        _pickling(name, value, lambda item: torch.save(item, _Nowhere()))


def _pickling(name: str, value: object, pickle: Callable[[object], _T]) -> _T:
    try:
        return pickle(value)
    except Exception as error:
        raise InvalidInput(
            f"'{name}' of type {type(value).__name__} cannot be pickled: {error}; "
            "have its state_dict() return tensors and plain values, or leave it out"
        ) from error


class _Nowhere(io.BytesIO):
    """A file that discards its content, so that pickling a large object takes no memory."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
