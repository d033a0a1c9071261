"""A job as policies see it."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field
from typing import Protocol

from pollux.core.errors import InvalidInput

__all__ = ["FixedBatchOracle", "GoodputFunction", "JobLimits", "JobView", "Prior", "is_gpu_type"]

_AMOUNTS = (
    "attained_gpu_seconds", "resize_cost_seconds", "remaining", "utilization", "memory_bytes", "hidden_seconds",
)  # fmt: skip
_WORDS = re.compile(r"[^\W_]+")


@functools.lru_cache(maxsize=4096)
def is_gpu_type(wanted: str, gpu_type: str) -> bool:
    """Whether `gpu_type` has all words of `wanted`, in upper or lower case.

    `a100` is "A100" (as Ray says), "a100" (Slurm) and "NVIDIA A100-SXM4-40GB" (the driver), but not "A10".
    """
    words = {word.casefold() for word in _WORDS.findall(wanted)}
    return wanted == gpu_type or (bool(words) and words <= {word.casefold() for word in _WORDS.findall(gpu_type)})


class GoodputFunction(Protocol):
    """A job's model as policies see it; `pollux.goodput` has implementations."""

    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        """Useful samples per second on that placement, at the best batch; 0 where it cannot run."""


class FixedBatchOracle(Protocol):
    """True times of a job with a fixed batch; only a simulator has them."""

    def step_seconds(self, num_gpus: int) -> float:
        """Seconds of one optimiser step on `num_gpus` packed GPUs."""

    def remaining_steps(self) -> float:
        """Optimiser steps until the job ends."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The placements that a job allows.

    Empty `gpu_types` mean any type, else see `takes_type`; a job runs on one type at a time unless `mixed_types`. A
    *pinned* job keeps its first placement. A job that is not `preemptible` may be resized, but never stopped. CPUs and
    memory are per GPU. A job that `shares_gpus` may have another one on its GPUs.
    """

    min_gpus: int = 1
    max_gpus: int = 64
    max_nodes: int | None = None
    gpu_types: tuple[str, ...] = ()
    mixed_types: bool = False
    cpus_per_gpu: float = 0.0
    memory_bytes_per_gpu: float = 0.0
    preemptible: bool = True
    pinned: bool = False
    shares_gpus: bool = False

    def __post_init__(self) -> None:
        if self.min_gpus < 1:
            raise InvalidInput(f"min_gpus is {self.min_gpus}; give at least 1")
        if self.max_gpus < self.min_gpus:
            raise InvalidInput(
                f"max_gpus is {self.max_gpus}, below min_gpus {self.min_gpus}; raise one or lower the other"
            )
        if self.max_nodes is not None and self.max_nodes < 1:
            raise InvalidInput(f"max_nodes is {self.max_nodes}; give at least 1, or leave it out")
        for name in ("cpus_per_gpu", "memory_bytes_per_gpu"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise InvalidInput(f"{name} is {value}; give a finite number, 0 or more")

    def takes_type(self, gpu_type: str) -> bool:
        """Whether the job may run on GPUs of this type; see `is_gpu_type`."""
        return not self.gpu_types or any(is_gpu_type(wanted, gpu_type) for wanted in self.gpu_types)


@dataclass(frozen=True, slots=True)
class Prior:
    """What earlier jobs of the same kind have shown; a new job is expected to be like them until it is measured.

    `goodput` holds for a job that begins; its curve was measured on up to `largest_gpus`, at `num_observations`
    places and batches, the last of them at `learned_at`. `total` are the useful samples of a whole job (the median
    of those that ended), `None` before the first. The curve was fitted to `observations`.
    """

    goodput: GoodputFunction
    largest_gpus: int
    num_observations: int
    learned_at: float
    total: float | None = None
    observations: tuple[object, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class JobView:
    """One job in a snapshot.

    `requested_gpus` is what its user asked for (rigid policies use it). `largest_gpus` is the most replicas
    it ever ran with. `remaining` is in useful samples (the unit of goodput), `None` when unknown.
    `resize_cost_seconds` is how long it pauses when its placement changes. `weight` is its priority.
    For `hidden_seconds` since `submitted_at` no policy could run it: it waited for other jobs or after failures, or was
    paused.

    Jobs of one `group`, such as the trials of a search, are one claimant. A job should end by its `deadline`, a time on
    the driver's clock. `loss_history` has the last losses it reported, oldest first, each after the useful samples it
    had by then. `utilization` is the share of a step in which its GPUs compute, `memory_bytes` the most memory that one
    of them holds. Empty or None: unknown.
    """

    id: str
    submitted_at: float
    limits: JobLimits = field(default_factory=JobLimits)
    requested_gpus: int = 1
    weight: float = 1.0
    queue: str = ""
    attained_gpu_seconds: float = 0.0
    num_restarts: int = 0
    largest_gpus: int = 0
    resize_cost_seconds: float = 30.0
    goodput: GoodputFunction | None = field(default=None, compare=False)
    remaining: float | None = None
    kind: str = ""
    group: str = ""
    deadline: float | None = None
    loss_history: tuple[tuple[float, float], ...] = ()
    utilization: float | None = None
    memory_bytes: float | None = None
    prior: Prior | None = field(default=None, compare=False)
    crashes: int = 0
    hidden_seconds: float = 0.0
    oracle: FixedBatchOracle | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidInput(f"job '{self.id}': weight is {self.weight}; give a finite number above 0")
        for name in _AMOUNTS:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"job '{self.id}': {name} is {value}; give a finite number, 0 or more")
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise InvalidInput(f"job '{self.id}': deadline is {self.deadline}; give a finite time, or none")
        if self.requested_gpus < 1:
            raise InvalidInput(f"job '{self.id}': requested_gpus is {self.requested_gpus}; give at least 1")
