"""The reports of a job's agent to the service: the state of training, and the learned model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "LARGEST_BATCH",
    "LARGEST_NUMBER",
    "LARGEST_SECONDS",
    "MOST_ERROR_CHARACTERS",
    "MOST_METRICS",
    "MOST_METRIC_LETTERS",
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
"""The largest number in a report, so that sums and products stay far from infinity."""

SMALLEST_NUMBER = 1e-30
"""The smallest number in a report, beside zero, so that ratios stay far from infinity."""

LARGEST_SECONDS = 1e9
"""The longest time of a part of a step, in seconds."""

MOST_ERROR_CHARACTERS = 500
"""The most characters of a `checkpoint_error`."""

MOST_METRICS = 256
"""The most metrics in a report."""

MOST_METRIC_LETTERS = 200
"""The most letters of a metric's name."""

LARGEST_BATCH = 10**12
"""The largest batch of a model, in samples."""


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
    `places` say how measurements correct it.
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
    `efficiency` useful samples per sample, `goodput` useful samples per second. `resize_seconds` is the measured pause
    of the restart that began this generation, with "restart" as `resize_kind`. The backend reports the pauses of live
    changes: those of kind "grow", "shrink", "move" or "recover" in a report are ignored. `live`: the job can follow
    live resizes. `checkpoint_seconds` is the time in which the newest checkpoint was written, `checkpoint_error` why
    the last attempt failed, else empty. `final` marks the last report of a job that is done. Numbers are zero, or from
    `SMALLEST_NUMBER` to `LARGEST_NUMBER` in size; a larger loss or metric counts as unknown.
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
    """The answer to a report: when to report next, and the largest local batch (None: no limit is known)."""

    report_every_seconds: float = 30.0
    local_batch_max: int | None = None
