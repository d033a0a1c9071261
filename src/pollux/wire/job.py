"""A user's request for a job, read and checked; `jobfile` reads job files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "BARE_PYTHON",
    "PRIORITY_WEIGHTS",
    "BatchSizes",
    "CheckpointRequest",
    "JobRequest",
    "OnResize",
    "Priority",
    "Resources",
]

BARE_PYTHON = frozenset({"python", "python3", f"python3.{sys.version_info.minor}"})
"""Commands that stand for the interpreter of Pollux where they run, unless the job sets its own PATH."""

Priority = Literal["low", "normal", "high"]
"""How much a job counts beside others."""

PRIORITY_WEIGHTS: Mapping[Priority, float] = {"low": 0.25, "normal": 1.0, "high": 4.0}
"""The weight of each priority in the policies' objective."""

OnResize = Literal["live", "restart", "never"]
"""How a job's GPUs may change while it runs; `never` makes it rigid. The default of elastic jobs is `live`."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes in samples; None if the script or the agent decides."""

    initial: int | None = None
    max: int | None = None
    per_gpu_max: int | None = None


@dataclass(frozen=True, slots=True)
class Resources:
    """What each replica needs beside its GPU; 0: not counted. Empty `gpu_types`: any type.

    `mixed_types`: replicas may run on GPUs of different types at the same time.
    """

    cpus: float = 0.0
    memory_bytes: float = 0.0
    gpu_types: tuple[str, ...] = ()
    mixed_types: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Where and how often the agent saves; None: the script decides, or the service chooses the folder."""

    dir: str | None = None
    every_seconds: float | None = None
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as it is submitted. `run` is the command and its arguments; `workdir` is absolute.

    Jobs of one `group` are one claimant. Jobs of one `kind` train alike; '' leaves it to the command. `deadline` is
    when it should have ended, in seconds since 1970.
    If `preemptible` is None, elastic jobs are; rigid ones (`on_resize` `never`, or one number of GPUs) are not.
    """

    name: str
    run: tuple[str, ...]
    min_gpus: int = 1
    max_gpus: int = 1
    batch_size: BatchSizes = field(default_factory=BatchSizes)
    resources: Resources = field(default_factory=Resources)
    workdir: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    priority: Priority = "normal"
    queue: str = "default"
    preemptible: bool | None = None
    after: tuple[str, ...] = ()
    time_limit_seconds: float | None = None
    retries: int = 3
    grace_seconds: float = 60.0
    on_resize: OnResize | None = None
    checkpoint: CheckpointRequest = field(default_factory=CheckpointRequest)
    group: str = ""
    kind: str = ""
    deadline: float | None = None

    @property
    def is_rigid(self) -> bool:
        """Whether it must keep its GPUs once it has them: by `on_resize`, or by default with one number of GPUs."""
        if self.on_resize is None:
            return self.min_gpus == self.max_gpus
        return self.on_resize == "never"

    @property
    def allows_live(self) -> bool:
        """Whether its user allows live resizes: it is elastic, and `on_resize` is not `restart`.

        Its agent reports whether they are possible; without an agent, the job restarts. `JobRecord.moves_live` says
        whether its next resize is tried live.
        """
        return not self.is_rigid and self.on_resize != "restart"

    @property
    def is_preemptible(self) -> bool:
        """Whether it may be stopped for others and continued later."""
        return not self.is_rigid if self.preemptible is None else self.preemptible
