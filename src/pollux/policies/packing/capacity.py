"""What is left on the nodes and in the queues while a decision is being built; shared by all policies."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from pollux.core import NOWHERE, JobLimits, JobView, Placement, Reason, Snapshot
from pollux.policies.packing.empty_cluster import Whole

__all__ = ["Room", "suits"]

_SLACK = 1e-9


def suits(limits: JobLimits, num_gpus: int, num_nodes: int, types: Collection[str]) -> bool:
    """Whether a job's limits allow so many GPUs of these types on so many nodes."""
    return (
        limits.min_gpus <= num_gpus <= limits.max_gpus
        and (limits.max_nodes is None or num_nodes <= limits.max_nodes)
        and all(limits.takes_type(gpu_type) for gpu_type in types)
        and (len(types) <= 1 or limits.mixed_types)
    )


class Room:
    """Free GPUs, CPUs, memory and quota; everything that is placed is taken from here."""

    def __init__(self, snapshot: Snapshot) -> None:
        nodes = snapshot.cluster.nodes
        self.snapshot, self.whole = snapshot, Whole(snapshot.cluster)
        self.gpus = {node.id: node.num_gpus for node in nodes}
        self._cpus = {node.id: node.num_cpus for node in nodes}
        self._memory = {node.id: node.memory_bytes for node in nodes}
        self._open = {node.id for node in nodes if node.schedulable}
        self._types = {node.id: node.gpu_type for node in nodes}
        self.types = tuple(dict.fromkeys(node.gpu_type for node in nodes))
        self._quota = {name: queue.gpu_quota for name, queue in snapshot.queues.items() if queue.gpu_quota is not None}

    @property
    def num_free(self) -> int:
        """GPUs that are free on open nodes."""
        return sum(max(self.gpus[node_id], 0) for node_id in self._open)

    def quota(self, queue: str) -> float:
        """GPUs that the queue may still take."""
        return self._quota.get(queue, math.inf)

    def available(self, job: JobView, node_id: str) -> int:
        """GPUs that the job could take on a node now, by GPUs, CPUs and memory; 0 on closed nodes."""
        if node_id not in self._open:
            return 0
        return self._capacity(job.limits, node_id)

    def _capacity(self, limits: JobLimits, node_id: str) -> int:
        count = self.gpus[node_id]
        if limits.cpus_per_gpu:
            count = min(count, _whole(self._cpus[node_id], limits.cpus_per_gpu))
        if limits.memory_bytes_per_gpu:
            count = min(count, _whole(self._memory[node_id], limits.memory_bytes_per_gpu))
        return max(count, 0)

    def can_keep(self, job: JobView, placement: Placement) -> bool:
        """Whether a job may stay where it is: the nodes still hold it, its limits still allow it."""
        limits = job.limits
        if limits.pinned and placement:
            return True
        types = {self._types.get(node_id, "") for node_id, _ in placement.shares}
        if not suits(limits, placement.num_gpus, placement.num_nodes, types):
            return False
        if placement.num_gpus > self.quota(job.queue):
            return False
        return all(
            node_id in self.gpus and self._capacity(limits, node_id) >= count for node_id, count in placement.shares
        )

    def part(self, job: JobView, placement: Placement, count: int) -> Placement:
        """`count` of the GPUs that the job holds, from its largest shares; `NOWHERE` if not allowed."""
        left, shares = count, {}
        for node_id, held in sorted(placement.shares, key=lambda share: -share[1]):
            usable = min(held, left, self._capacity(job.limits, node_id) if node_id in self.gpus else 0)
            shares[node_id] = usable
            left -= usable
        kept = Placement.of({node_id: shares[node_id] for node_id, _ in placement.shares})
        return kept if left == 0 and self.can_keep(job, kept) else NOWHERE

    def take(self, job: JobView, placement: Placement) -> None:
        """Hold these GPUs for the job."""
        self._move(job, placement, 1)

    def give(self, job: JobView, placement: Placement) -> None:
        """Free these GPUs again."""
        self._move(job, placement, -1)

    def _move(self, job: JobView, placement: Placement, sign: int) -> None:
        limits = job.limits
        for node_id, count in placement.shares:
            if node_id not in self.gpus:
                continue
            self.gpus[node_id] -= sign * count
            if limits.cpus_per_gpu:
                self._cpus[node_id] -= sign * count * limits.cpus_per_gpu
            if limits.memory_bytes_per_gpu:
                self._memory[node_id] -= sign * count * limits.memory_bytes_per_gpu
        if job.queue in self._quota:
            self._quota[job.queue] -= sign * placement.num_gpus

    def nodes_for(self, job: JobView, gpu_type: str | None) -> Iterable[str]:
        """Nodes of a type (`None`: any) on which the job may run, in order."""
        allowed = {kind for kind in self.types if job.limits.takes_type(kind)}
        for node_id, node_type in self._types.items():
            if (gpu_type is None or node_type == gpu_type) and node_type in allowed:
                yield node_id

    def most(self, job: JobView) -> int:
        """The most GPUs that the job could take now, within its limits."""
        found = max((sum(count for count, _ in nodes) for nodes in self._by_type(job)), default=0)
        return int(min(found, job.limits.max_gpus, max(self.quota(job.queue), 0)))

    def spread(self, job: JobView, count: int) -> Placement:
        """`count` GPUs from the nodes with most left, the first node among equals; `NOWHERE` if impossible.

        A job that may not mix types is tried on each type in turn.
        """
        if count > self.quota(job.queue):
            return NOWHERE
        for nodes in self._by_type(job):
            left, shares = count, []
            for available, node_id in nodes:
                if left:
                    shares.append((node_id, min(left, available)))
                    left -= shares[-1][1]
            if not left:
                return Placement(tuple(shares))
        return NOWHERE

    def _by_type(self, job: JobView) -> Iterator[list[tuple[int, str]]]:
        """For each choice of GPU type, nodes with GPUs left for a job: most first, at most its `max_nodes`."""
        mixed = job.limits.mixed_types or len(self.types) == 1
        for gpu_type in [None] if mixed else self.types:
            nodes = self.nodes_for(job, gpu_type)
            found = [(count, node) for node in nodes if (count := self.available(job, node))]
            found.sort(key=lambda entry: -entry[0])
            yield found[: job.limits.max_nodes]

    def refusal(self, job: JobView, wanted: int) -> Reason:
        """Why a job that could use `wanted` GPUs holds none, once all others are placed."""
        lacks = self.whole.lacks(job.limits, self.snapshot.queues.get(job.queue), wanted)
        if lacks:
            return Reason("fits-nowhere", lacks)
        quota, free = self.quota(job.queue), self.num_free
        if wanted > quota:
            return Reason("waits-for-quota", {"gpus": wanted, "quota_left": max(quota, 0)})
        return Reason("waits-for-gpus" if wanted > free else "no-room", {"gpus": wanted, "free_gpus": free})


def _whole(have: float, each: float) -> int:
    return 2**31 if math.isinf(have) else math.floor(have / each + _SLACK)
