"""What a job's agent tells the service now and then: where training stands, and the model it has learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "LARGEST_BATCH",
    "LARGEST_NUMBER",
    "LARGEST_SECONDS",
    "MOST_ERROR_CHARACTERS",
    "REPORT_VERSION",
    "SMALLEST_NUMBER",
    "ModelReport",
    "NoiseReport",
    "PlaceCorrection",
    "Report",
    "ReportReply",
]

REPORT_VERSION = 1

LARGEST_NUMBER = 1e30
"""No number of a training job is larger; sums and products of those that are taken stay far from infinity."""

SMALLEST_NUMBER = 1e-30
"""No number of a training job is nearer to zero, but zero itself; what is divided by one stays far from infinity."""

LARGEST_SECONDS = 1e9
"""No part of a step takes longer, in seconds."""

MOST_ERROR_CHARACTERS = 500
"""No `checkpoint_error` is longer."""

LARGEST_BATCH = 10**12
"""No batch of a model is larger, in samples."""


@dataclass(frozen=True, slots=True)
class NoiseReport:
    """The gradient noise scale in samples, its 95 % interval (`high` None: unbounded) and the steps measured for it."""

    scale: float
    low: float
    high: float | None
    measured: int


@dataclass(frozen=True, slots=True)
class PlaceCorrection:
    """How far measured step times are from the fitted ones on a placement: the logarithm of their ratio, −1 to 1."""

    num_nodes: int
    num_gpus: int
    log_ratio: float


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The learned goodput model as plain numbers.

    `parameters` are the seven of the published throughput model (αc βc αn βn αr βr γ) on `gpu_type`; `grad_sqr` and
    `grad_var` make the efficiency (1 and 0: exact mode, efficiency counts from the initial batch only).
    Batches are in samples, at most `LARGEST_BATCH`; parameters but γ in seconds, at most `LARGEST_SECONDS`. At most 32
    `places` say what measurements correct of it.
    """

    parameters: tuple[float, ...]
    gpu_type: str
    initial_batch: int
    max_batch: int
    local_batch_max: int
    grad_sqr: float
    grad_var: float
    accumulation: bool = True
    local_batch_min: int = 1
    places: tuple[PlaceCorrection, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """One report of replica 0, for all replicas. Fields that are None are unknown.

    `progress` and `total_progress` are in useful samples (the unit of goodput); `throughput` in samples per second,
    `efficiency` useful samples per sample, `goodput` useful samples per second. `resize_seconds` is the measured
    pause of this job's last re-allocation, `resize_kind` what that was: "grow", "shrink", "move", "recover" (all in
    living processes) or "restart"; empty where it is not known. `live`: its replicas can follow a re-allocation without
    ending. `checkpoint_seconds` is how long the newest checkpoint took until it was whole, `checkpoint_error` why the
    last one could not be written, else empty. `final` marks the last report of a job that is done. Numbers are zero, or
    between `SMALLEST_NUMBER` and `LARGEST_NUMBER` in size; a loss or metric beyond the largest is taken for unknown.
    """

    generation: int
    step: int
    samples: int
    progress: float
    epoch: float
    num_replicas: int
    num_nodes: int
    batch_size: int
    local_batch: int
    accumulation: int
    learning_rate_factor: float = 1.0
    efficiency: float = 1.0
    throughput: float | None = None
    step_seconds: float | None = None
    goodput: float | None = None
    total_progress: float | None = None
    noise: NoiseReport | None = None
    model: ModelReport | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    resize_seconds: float | None = None
    resize_kind: str = ""
    live: bool = False
    checkpoint_age_seconds: float | None = None
    checkpoint_seconds: float | None = None
    checkpoint_error: str = ""
    exact: bool = True
    final: bool = False
    version: int = REPORT_VERSION


@dataclass(frozen=True, slots=True)
class ReportReply:
    """What the agent gets back: when to report next, and the largest local batch it may try (None: no limit known)."""

    report_every_seconds: float = 30.0
    local_batch_max: int | None = None
