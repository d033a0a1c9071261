"""What one job could have were it alone, and what keeps it from that."""

import math

import pytest

from pollux.core import Cluster, JobLimits, Node, Queue
from pollux.policies.packing.empty_cluster import Whole
from pollux.testing import cluster

MIXED = Cluster((
    Node("a", 4, "t4", num_cpus=8.0, memory_bytes=64.0), Node("b", 4, "t4", num_cpus=16.0, memory_bytes=32.0),
    Node("c", 2, "h100"), Node("closed", 8, "h100", schedulable=False), Node("empty", 0, "t4"),
))  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (JobLimits(), 8),
        (JobLimits(max_nodes=1), 4),
        (JobLimits(gpu_types=("h100",)), 2),
        (JobLimits(mixed_types=True), 10),
        (JobLimits(cpus_per_gpu=4.0), 6),
        (JobLimits(cpus_per_gpu=4.0, max_nodes=1), 4),
        (JobLimits(memory_bytes_per_gpu=32.0), 3),
        (JobLimits(cpus_per_gpu=4.0, memory_bytes_per_gpu=32.0), 3),
        (JobLimits(gpu_types=("h100",), cpus_per_gpu=1e6), 2),
        (JobLimits(gpu_types=("v100",)), 0),
    ],
)
def test_the_most_that_suits(limits, most):
    assert Whole(MIXED).most(limits) == most


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (JobLimits(8), {}),
        (JobLimits(9, 9), {"suitable_gpus": 8.0}),
        (
            JobLimits(3, gpu_types=("h100", "v100")),
            {"suitable_gpus": 2.0, "wanted_type:h100": 2.0, "wanted_type:v100": 0.0, "other_type:t4": 8.0},
        ),
        (
            JobLimits(7, gpu_types=("t4",), cpus_per_gpu=4.0),
            {"suitable_gpus": 6.0, "cpus_per_gpu": 4.0, "largest_node_cpus": 16.0},
        ),
        (
            JobLimits(4, gpu_types=("t4",), memory_bytes_per_gpu=32.0),
            {"suitable_gpus": 3.0, "memory_bytes_per_gpu": 32.0, "largest_node_memory_bytes": 64.0},
        ),
        (JobLimits(5, max_nodes=1), {"suitable_gpus": 4.0, "max_nodes": 1.0}),
    ],
)
def test_what_is_lacking(limits, numbers):
    assert Whole(MIXED).lacks(limits) == ({"gpus": float(limits.min_gpus), **numbers} if numbers else {})


def test_numbers_that_nobody_counts_are_left_out():
    lacks = Whole(MIXED).lacks(JobLimits(7, cpus_per_gpu=4.0))
    assert lacks == {"gpus": 7.0, "suitable_gpus": 6.0, "cpus_per_gpu": 4.0}
    assert all(math.isfinite(number) for number in lacks.values())


def test_a_quota_counts_last():
    whole = Whole(cluster(4))
    assert whole.lacks(JobLimits(3), Queue("q", gpu_quota=2)) == {"gpus": 3.0, "queue_quota": 2.0}
    assert whole.lacks(JobLimits(5, 5), Queue("q", gpu_quota=2)) == {"gpus": 5.0, "suitable_gpus": 4.0}
    assert whole.lacks(JobLimits(2), Queue("q", gpu_quota=2)) == {}
    assert whole.lacks(JobLimits(1), Queue("q", gpu_quota=4), wanted=5) == {"gpus": 5.0, "suitable_gpus": 4.0}
    assert whole.lacks(JobLimits(1), Queue("q")) == {}
