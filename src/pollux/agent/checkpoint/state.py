"""The state of a job as checkpoints and transfers carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["State"]


@dataclass(slots=True)
class State:
    """Tensors by flat name, objects that only PyTorch's own format holds, and plain values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
