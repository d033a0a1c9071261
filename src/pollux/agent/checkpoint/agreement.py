"""How replicas tell each other texts and errors: as bytes in tensors, so that nothing is unpickled.

Used by what must end alike on all replicas; the group must be able to send CPU tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
import torch.distributed as dist

from pollux.agent.checkpoint.host_buffers import Abandoned
from pollux.core.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    InvalidInput,
    MisusedJob,
    NonFiniteValue,
    Unreachable,
)

__all__ = ["Outcome", "attempt", "broadcast_text", "gather_texts"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[_T]):
    """What an attempt gave: a value, or the problem that came instead; as text it travels between replicas."""

    value: _T | None = None
    problem: Exception | None = None

    def get(self) -> _T:
        """The value; raises the problem where there is one."""
        if self.problem is not None:
            raise self.problem
        return cast(_T, self.value)

    def text(self) -> str:
        """The outcome as JSON; the value must be one that JSON can hold, a problem keeps its class and message."""
        problem = None if self.problem is None else [type(self.problem).__name__, str(self.problem)]
        return json.dumps({"value": self.value if problem is None else None, "problem": problem})

    @classmethod
    def read(cls, text: str) -> Outcome[_T]:
        """What `text` wrote, here or on another replica; an error of a class not known here is a `RuntimeError`."""
        entries = json.loads(text)
        return cls(entries["value"], None if entries["problem"] is None else _rebuilt(*entries["problem"]))


def attempt(action: Callable[[], _T]) -> Outcome[_T]:
    """Call `action` and keep what it returns or raises, so that a failure can be told before it is raised."""
    try:
        return Outcome(action())
    except Exception as error:
        return Outcome(problem=error)


_TRAVELLING = {
    kind.__name__: kind
    for kind in (
        Abandoned,
        CheckpointDamaged,
        CheckpointMismatch,
        InvalidInput,
        MisusedJob,
        NonFiniteValue,
        Unreachable,
    )
}


def _rebuilt(name: str, message: str) -> Exception:
    kind = _TRAVELLING.get(name)
    return RuntimeError(f"{name}: {message}") if kind is None else kind(message)


def broadcast_text(text: str, group: dist.ProcessGroup | None) -> str:
    """The text of the group's first replica, sent as bytes in a tensor."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    dist.broadcast(length, first, group=group)
    if dist.get_rank() != first:
        content = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(content, first, group=group)
    return content.numpy().tobytes().decode()


def gather_texts(text: str, group: dist.ProcessGroup | None, num_replicas: int) -> list[str]:
    """The texts of all replicas, sent as bytes in tensors."""
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(num_replicas)]
    dist.all_gather(lengths, torch.tensor([content.numel()]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: content.numel()] = content
    parts = [torch.empty_like(padded) for _ in range(num_replicas)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(length)].numpy().tobytes().decode() for part, length in zip(parts, lengths, strict=True)]
