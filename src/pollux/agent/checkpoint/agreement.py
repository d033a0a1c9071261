"""The outcome of an attempt as bytes, so that all replicas learn it and end alike where one of them failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from pollux.agent.checkpoint.host_buffers import Abandoned
from pollux.core.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    InvalidInput,
    MisusedJob,
    NonFiniteValue,
    Unreachable,
)

__all__ = ["Outcome", "attempt"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[_T]):
    """What an attempt returned, or the error that it raised."""

    value: _T | None = None
    problem: Exception | None = None

    def get(self) -> _T:
        """The value; raises the problem where there is one."""
        if self.problem is not None:
            raise self.problem
        return cast(_T, self.value)

    def encode(self) -> bytes:
        """The outcome as JSON, which must be able to hold the value; a problem keeps its class and message."""
        problem = None if self.problem is None else [type(self.problem).__name__, str(self.problem)]
        return json.dumps({"value": self.value if problem is None else None, "problem": problem}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Outcome[_T]:
        """The outcome that `encode` wrote on some replica; an error of an unknown class becomes a `RuntimeError`."""
        entries = json.loads(content)
        return cls(entries["value"], None if entries["problem"] is None else _rebuilt(*entries["problem"]))


def attempt(action: Callable[[], _T]) -> Outcome[_T]:
    """Call `action` and keep what it returns or raises, so that other replicas hear of an error before it is raised."""
    try:
        return Outcome(action())
    except Exception as error:
        return Outcome(problem=error)


_KINDS = (Abandoned, CheckpointDamaged, CheckpointMismatch, InvalidInput, MisusedJob, NonFiniteValue, Unreachable)


def _rebuilt(name: str, message: str) -> Exception:
    kind = {kind.__name__: kind for kind in _KINDS}.get(name)
    return RuntimeError(f"{name}: {message}") if kind is None else kind(message)
