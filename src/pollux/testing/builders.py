"""Short ways to write down clusters, jobs and snapshots in a test. No randomness: that is in `strategies`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pollux.core import Cluster, Decision, JobLimits, JobView, Node, Placement, Queue, Snapshot
from pollux.goodput import BatchLimits, Efficiency, GoodputModel, PublishedThroughput

__all__ = [
    "FakeOracle",
    "SaturatingGoodput",
    "after",
    "cluster",
    "goodput_model",
    "job",
    "place",
    "snapshot",
]

_LIMITS = frozenset(JobLimits.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class SaturatingGoodput:
    """A model in one line: `rate · speed · K / (1 + (K − 1)/knee)`, times `across_nodes` on several nodes.

    Linear in K while `knee` is infinite. `speed` holds factors of GPU types; a type without one has 1.
    """

    rate: float = 100.0
    knee: float = math.inf
    across_nodes: float = 1.0
    speed: Mapping[str, float] = field(default_factory=dict, hash=False)

    def goodput(self, num_nodes: int, num_gpus: int, gpu_type: str = "") -> float:
        """Useful samples per second; 0 for a placement that does not exist."""
        if not 1 <= num_nodes <= num_gpus:
            return 0.0
        slowdown = self.across_nodes if num_nodes > 1 else 1.0
        return self.rate * self.speed.get(gpu_type, 1.0) * slowdown * num_gpus / (1 + (num_gpus - 1) / self.knee)


@dataclass(frozen=True, slots=True)
class FakeOracle:
    """True times by Amdahl's law: a step takes `serial_seconds + parallel_seconds / K`."""

    parallel_seconds: float = 1.0
    steps: float = 1000.0
    serial_seconds: float = 0.1

    def step_seconds(self, num_gpus: int) -> float:
        """Seconds of one optimiser step on `num_gpus`."""
        return self.serial_seconds + self.parallel_seconds / num_gpus

    def remaining_steps(self) -> float:
        """Optimiser steps until the job ends."""
        return self.steps


def goodput_model(
    *,
    compute_seconds: float = 0.05,
    sync_seconds: float = 0.02,
    noise_scale: float = 1000.0,
    initial: int = 128,
) -> GoodputModel:
    """A published seven-parameter model with round numbers.

    `compute_seconds` is for one initial batch on one GPU, `sync_seconds` within a node; across nodes it is
    four times that. `noise_scale` (φ, in samples) says how far a larger batch still pays.
    """
    throughput = PublishedThroughput(
        alpha_c=compute_seconds / 4,
        beta_c=compute_seconds * 3 / 4 / initial,
        alpha_n=4 * sync_seconds,
        beta_n=sync_seconds / 10,
        alpha_r=sync_seconds,
        beta_r=sync_seconds / 40,
        gamma=2.0,
    )
    efficiency = Efficiency(initial, grad_sqr=1.0, grad_var=noise_scale / initial)
    return GoodputModel(throughput, efficiency, BatchLimits(initial, 32 * initial, initial // 4, 4 * initial))


def cluster(*gpus: int, **node: Any) -> Cluster:
    """Nodes `n0`, `n1`, ... with these numbers of GPUs (default 4 and 4); all have the other fields of `node`."""
    return Cluster.of(Node(f"n{index}", count, **node) for index, count in enumerate(gpus or (4, 4)))


def job(job_id: str, submitted_at: float = 0.0, **fields: Any) -> JobView:
    """A job; `fields` are fields of `JobView` and of `JobLimits`."""
    limits = {name: value for name, value in fields.items() if name in _LIMITS}
    rest = {name: value for name, value in fields.items() if name not in _LIMITS}
    if limits:
        rest["limits"] = JobLimits(**limits)
    return JobView(job_id, submitted_at, **rest)


def place(text: str) -> Placement:
    """A placement from its printed form, such as `place("n0:4 n1:2")`; an empty text is no placement."""
    pairs = (word.rpartition(":") for word in text.split())
    return Placement(tuple((node, int(count)) for node, _, count in pairs))


def snapshot(
    nodes: Cluster | None = None,
    jobs: Iterable[JobView] = (),
    running: Mapping[str, str] | None = None,
    *,
    queues: Iterable[Queue] = (),
    now: float = 600.0,
    revision: int = 1,
    seed: int = 0,
    memory: object = None,
) -> Snapshot:
    """A snapshot at ten minutes; `running` maps job ids to placements as in `place`."""
    return Snapshot(
        revision,
        now,
        cluster() if nodes is None else nodes,
        tuple(jobs),
        {job_id: place(text) for job_id, text in (running or {}).items()},
        {queue.name: queue for queue in queues},
        seed,
        memory,
    )


def after(before: Snapshot, decision: Decision, seconds: float = 0.0) -> Snapshot:
    """The snapshot after `decision` is applied and nothing else happens for `seconds`.

    Counts restarts, largest sizes and GPU-seconds like the controller, and keeps the policy's memory.
    """
    jobs = []
    for view in before.jobs:
        old, new = before.placement(view.id), decision.allocation.get(view.id, Placement())
        restarted = bool(new) and new != old and view.largest_gpus > 0
        jobs.append(
            replace(
                view,
                attained_gpu_seconds=view.attained_gpu_seconds + new.num_gpus * seconds,
                num_restarts=view.num_restarts + restarted,
                largest_gpus=max(view.largest_gpus, new.num_gpus),
            )
        )
    return replace(
        before,
        revision=before.revision + 1,
        now=before.now + seconds,
        jobs=tuple(jobs),
        running={job_id: placement for job_id, placement in decision.allocation.items() if placement},
        memory=decision.memory,
    )
