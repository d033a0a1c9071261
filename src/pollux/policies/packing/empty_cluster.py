"""What one job could have alone in a cluster, and the numbers that show why this is too little."""

from __future__ import annotations

import math
from collections import Counter

from pollux.core import Cluster, JobLimits, Queue, is_gpu_type

__all__ = ["OTHER_TYPE", "WANTED_TYPE", "Whole"]

WANTED_TYPE = "wanted_type:"
"""Prefix for the number of GPUs of a type that the job takes; the type follows."""

OTHER_TYPE = "other_type:"
"""Prefix for the number of GPUs of a type that the job does not take; the type follows."""

_SLACK = 1e-9

_Kind = tuple[str, int, float, float]


class Whole:
    """The open nodes of a cluster, by kind, without jobs."""

    def __init__(self, cluster: Cluster) -> None:
        self._kinds: Counter[_Kind] = Counter(
            (node.gpu_type, node.num_gpus, node.num_cpus, node.memory_bytes)
            for node in cluster.nodes
            if node.schedulable and node.num_gpus
        )

    def most(self, limits: JobLimits, *, cpus: bool = True, memory: bool = True, nodes: bool = True) -> int:
        """The most GPUs that suit a job, whatever its minimum and maximum; some of its limits may be ignored."""
        by_type: dict[str, list[tuple[int, int]]] = {}
        for (gpu_type, num_gpus, num_cpus, memory_bytes), count in self._kinds.items():
            if not limits.takes_type(gpu_type):
                continue
            each = num_gpus
            if cpus and limits.cpus_per_gpu:
                each = min(each, _whole(num_cpus, limits.cpus_per_gpu))
            if memory and limits.memory_bytes_per_gpu:
                each = min(each, _whole(memory_bytes, limits.memory_bytes_per_gpu))
            by_type.setdefault("" if limits.mixed_types else gpu_type, []).append((each, count))
        allowed = limits.max_nodes if nodes and limits.max_nodes is not None else sum(self._kinds.values())
        return max((_sum_of_largest(found, allowed) for found in by_type.values()), default=0)

    def lacks(self, limits: JobLimits, queue: Queue | None = None, wanted: int | None = None) -> dict[str, float]:
        """Why even an empty cluster cannot give a job `wanted` GPUs (None: its minimum): the limit's numbers.

        They are those of the first limit that prevents it; empty if none does. `gpus` is always there: those it
        needs. A quota adds `queue_quota`; any other limit adds `suitable_gpus`, those there are for it. Types also add
        a number for every type, CPUs `cpus_per_gpu` and `largest_node_cpus`, memory the same in bytes, nodes
        `max_nodes`.
        """
        needed = limits.min_gpus if wanted is None else wanted
        for numbers, most in (
            (self._by_type(limits), self.most(limits, cpus=False, memory=False, nodes=False)),
            (self._by_cpus(limits), self.most(limits, memory=False, nodes=False)),
            (self._by_memory(limits), self.most(limits, nodes=False)),
            ({"max_nodes": float(limits.max_nodes or 0)}, self.most(limits)),
        ):
            if most < needed:
                return {"gpus": float(needed), "suitable_gpus": float(most), **numbers}
        if queue is not None and queue.gpu_quota is not None and queue.gpu_quota < needed:
            return {"gpus": float(needed), "queue_quota": float(queue.gpu_quota)}
        return {}

    def _by_type(self, limits: JobLimits) -> dict[str, float]:
        if not limits.gpu_types:
            return {}
        numbers = {WANTED_TYPE + gpu_type: 0.0 for gpu_type in limits.gpu_types}
        for (gpu_type, num_gpus, _, _), count in self._kinds.items():
            if gpu_type:
                wanted = [word for word in limits.gpu_types if is_gpu_type(word, gpu_type)]
                name = WANTED_TYPE + wanted[0] if wanted else OTHER_TYPE + gpu_type
                numbers[name] = numbers.get(name, 0.0) + num_gpus * count
        return numbers

    def _by_cpus(self, limits: JobLimits) -> dict[str, float]:
        largest = max((cpus for gpu_type, _, cpus, _ in self._kinds if limits.takes_type(gpu_type)), default=0.0)
        return _finite({"cpus_per_gpu": limits.cpus_per_gpu, "largest_node_cpus": largest})

    def _by_memory(self, limits: JobLimits) -> dict[str, float]:
        largest = max((memory for gpu_type, _, _, memory in self._kinds if limits.takes_type(gpu_type)), default=0.0)
        return _finite({"memory_bytes_per_gpu": limits.memory_bytes_per_gpu, "largest_node_memory_bytes": largest})


def _finite(numbers: dict[str, float]) -> dict[str, float]:
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _whole(have: float, each: float) -> int:
    return 2**31 if math.isinf(have) else math.floor(have / each + _SLACK)


def _sum_of_largest(found: list[tuple[int, int]], nodes: int) -> int:
    total = 0
    for each, count in sorted(found, reverse=True):
        total += each * min(count, nodes)
        nodes -= min(count, nodes)
    return total
