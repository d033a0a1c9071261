"""The rules of a legal decision, which the controller checks before it applies any decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pollux.core.cluster import Node
from pollux.core.job import JobLimits, JobView
from pollux.core.placement import NOWHERE, Placement
from pollux.core.snapshot import Decision, Snapshot

__all__ = ["Violation", "check"]

# Sums of fractional requests carry rounding errors; a millionth of what a node has is not an overload.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule: its name, the job, node or queue, and a sentence with the numbers."""

    rule: str
    subject: str
    message: str

    def __str__(self) -> str:
        return self.message


def check(snapshot: Snapshot, decision: Decision) -> tuple[Violation, ...]:
    """All rules that `decision` breaks, in a fixed order; empty when it is legal.

    A running job that is pinned or not preemptible breaks no rule while its placement stays the same, whatever has
    changed around it. If such jobs alone hold more than a node or a queue has, no other job may hold anything there.
    So every snapshot has a legal decision.
    """
    jobs = {job.id: job for job in snapshot.jobs}
    found: list[Violation] = []
    for job_id in decision.allocation:
        if job_id not in jobs:
            found.append(Violation("known-job", job_id, f"job '{job_id}' is not in the snapshot"))
    for job in snapshot.jobs:
        new, old = decision.allocation.get(job.id, NOWHERE), snapshot.placement(job.id)
        if new or old:
            found.extend(_check_job(snapshot, job, old, new))
    found.extend(_check_nodes(snapshot, decision, jobs))
    found.extend(_check_quotas(snapshot, decision, jobs))
    return tuple(found)


def _check_job(snapshot: Snapshot, job: JobView, old: Placement, new: Placement) -> Iterator[Violation]:
    limits = job.limits
    if old and limits.pinned:
        if new != old:
            yield Violation("pinned", job.id, f"job '{job.id}' is pinned to {old} and was moved to {new}")
        return
    if old and not limits.preemptible:
        if new == old:
            return
        if not new:
            yield Violation("preemptible", job.id, f"job '{job.id}' is not preemptible and was stopped")
    if new:
        yield from _check_size(job, new)
        yield from _check_node_use(snapshot, job, old, new)


def _check_size(job: JobView, new: Placement) -> Iterator[Violation]:
    limits = job.limits
    if new.shared and not limits.shares_gpus:
        yield Violation("shared", job.id, f"job '{job.id}' shares no GPUs and got halves of {new.num_gpus}")
    if new.num_gpus < limits.min_gpus:
        yield Violation(
            "min-gpus", job.id, f"job '{job.id}' got {new.num_gpus} GPUs, below its minimum {limits.min_gpus}"
        )
    if new.num_gpus > limits.max_gpus:
        yield Violation(
            "max-gpus", job.id, f"job '{job.id}' got {new.num_gpus} GPUs, above its maximum {limits.max_gpus}"
        )
    if limits.max_nodes is not None and new.num_nodes > limits.max_nodes:
        yield Violation(
            "max-nodes",
            job.id,
            f"job '{job.id}' got {new.num_nodes} nodes, above its maximum {limits.max_nodes}",
        )


def _check_node_use(snapshot: Snapshot, job: JobView, old: Placement, new: Placement) -> Iterator[Violation]:
    by_id = snapshot.cluster.by_id
    types: set[str] = set()
    for node_id, count in new.shares:
        node = by_id.get(node_id)
        if node is None:
            yield Violation("known-node", job.id, f"job '{job.id}' was placed on unknown node '{node_id}'")
            continue
        types.add(node.gpu_type)
        if not job.limits.takes_type(node.gpu_type):
            wanted = ", ".join(job.limits.gpu_types)
            yield Violation("gpu-type", job.id, f"job '{job.id}' wants {wanted} and got {node.gpu_type} on '{node_id}'")
        if not node.schedulable and count > old.on(node_id):
            yield Violation("schedulable", job.id, f"job '{job.id}' got new GPUs on closed node '{node_id}'")
    if len(types) > 1 and not job.limits.mixed_types:
        yield Violation("one-gpu-type", job.id, f"job '{job.id}' spans GPU types {', '.join(sorted(types))}")


class _Load:
    """The resources that jobs hold on one node."""

    __slots__ = ("cpus", "halves", "memory_bytes", "most_halves", "whole")

    def __init__(self) -> None:
        self.whole, self.halves, self.most_halves = 0, 0, 0
        self.cpus, self.memory_bytes = 0.0, 0.0

    @property
    def gpus(self) -> int:
        """GPUs in use: halves of two jobs fit on one GPU, halves of the same job do not."""
        return self.whole + max((self.halves + 1) // 2, self.most_halves)

    def add(self, count: int, limits: JobLimits, shared: bool) -> None:
        if shared:
            self.halves += count
            self.most_halves = max(self.most_halves, count)
        else:
            self.whole += count
        self.cpus += count * limits.cpus_per_gpu
        self.memory_bytes += count * limits.memory_bytes_per_gpu


def _stays(snapshot: Snapshot, job: JobView, new: Placement) -> bool:
    """Whether the job may not be stopped and keeps its placement."""
    immovable = job.limits.pinned or not job.limits.preemptible
    return immovable and bool(new) and new == snapshot.placement(job.id)


def _check_nodes(snapshot: Snapshot, decision: Decision, jobs: dict[str, JobView]) -> Iterator[Violation]:
    held: defaultdict[str, _Load] = defaultdict(_Load)
    staying: defaultdict[str, _Load] = defaultdict(_Load)
    for job_id, placement in decision.allocation.items():
        job = jobs.get(job_id)
        limits = JobLimits() if job is None else job.limits
        stays = job is not None and _stays(snapshot, job, placement)
        for node_id, count in placement.shares:
            held[node_id].add(count, limits, placement.shared)
            if stays:
                staying[node_id].add(count, limits, placement.shared)
    for node_id, load in held.items():
        node = snapshot.cluster.by_id.get(node_id)
        if node is not None:
            yield from _check_node(node, load, staying[node_id])


def _check_node(node: Node, held: _Load, staying: _Load) -> Iterator[Violation]:
    if held.gpus > max(node.num_gpus, staying.gpus):
        message = f"node '{node.id}' has {node.num_gpus} GPUs and was given {held.gpus}"
        yield Violation("gpus", node.id, message)
    if _exceeds(held.cpus, max(node.num_cpus, staying.cpus)):
        message = f"node '{node.id}' has {node.num_cpus:g} CPUs and was given {held.cpus:g}"
        yield Violation("cpus", node.id, message)
    if _exceeds(held.memory_bytes, max(node.memory_bytes, staying.memory_bytes)):
        message = f"node '{node.id}' has {node.memory_bytes:g} bytes and was given {held.memory_bytes:g}"
        yield Violation("memory", node.id, message)


def _exceeds(used: float, available: float) -> bool:
    return used > available + _SLACK * max(available, 1.0)


def _check_quotas(snapshot: Snapshot, decision: Decision, jobs: dict[str, JobView]) -> Iterator[Violation]:
    limited = {name: queue.gpu_quota for name, queue in snapshot.queues.items() if queue.gpu_quota is not None}
    if not limited:
        return
    used: defaultdict[str, int] = defaultdict(int)
    fixed: defaultdict[str, int] = defaultdict(int)
    for job_id, placement in decision.allocation.items():
        job = jobs.get(job_id)
        if job is None or job.queue not in limited:
            continue
        used[job.queue] += placement.num_gpus
        if _stays(snapshot, job, placement):
            fixed[job.queue] += placement.num_gpus
        elif snapshot.placement(job_id) and not job.limits.preemptible:
            fixed[job.queue] += min(placement.num_gpus, job.limits.min_gpus)
    for name, quota in limited.items():
        # A quota below what immovable jobs hold cannot be met; then no other job may hold anything.
        if used[name] > max(quota, fixed[name]):
            yield Violation("quota", name, f"queue '{name}' may hold {quota} GPUs and was given {used[name]}")
