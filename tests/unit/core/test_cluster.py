import math

import pytest

from pollux.core import Cluster, InvalidInput, Node, Queue


def test_a_cluster_knows_its_nodes_and_gpus():
    cluster = Cluster.of([Node("b", 4), Node("a", 8, "a100")])
    assert cluster.num_gpus == 12
    assert [node.id for node in cluster.nodes] == ["b", "a"]
    assert cluster.by_id["a"].gpu_type == "a100"


def test_uniform_numbers_its_nodes():
    cluster = Cluster.uniform(3, 4, gpu_type="t4", num_cpus=32.0)
    assert cluster.nodes == tuple(Node(f"node-{i}", 4, "t4", 32.0) for i in range(3))


def test_an_empty_cluster_is_allowed_but_not_a_uniform_one_of_nothing():
    assert Cluster.of(()).num_gpus == 0
    for nodes, gpus in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(InvalidInput, match=f"{nodes} nodes x {gpus} GPUs"):
            Cluster.uniform(nodes, gpus)


def test_two_nodes_of_one_name_are_refused():
    with pytest.raises(InvalidInput, match="node id 'b' appears twice"):
        Cluster.of([Node("a", 1), Node("b", 1), Node("b", 2)])


def test_clusters_are_equal_when_their_nodes_are():
    assert Cluster.uniform(2, 4) == Cluster.uniform(2, 4)
    assert Cluster.uniform(2, 4) != Cluster.uniform(2, 8)


def test_what_nobody_counts_is_infinite():
    node = Node("a", 4)
    assert node.num_cpus == node.memory_bytes == math.inf
    assert node.schedulable
    assert not node.preemptible
    assert not node.isolated_network


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_gpus": -1}, "num_gpus is -1"),
        ({"num_gpus": 1, "num_cpus": -0.5}, "num_cpus is -0.5"),
        ({"num_gpus": 1, "num_cpus": math.nan}, "num_cpus is nan"),
        ({"num_gpus": 1, "memory_bytes": -1}, "memory_bytes is -1"),
    ],
)
def test_impossible_nodes_are_refused(fields, said):
    with pytest.raises(InvalidInput, match=f"node 'a': {said}"):
        Node("a", **fields)


@pytest.mark.parametrize("weight", [0, -1, math.inf, math.nan])
def test_a_queue_needs_a_weight(weight):
    with pytest.raises(InvalidInput, match="queue 'q': weight"):
        Queue("q", weight=weight)


def test_a_quota_may_be_nothing_but_not_less():
    assert Queue("q", gpu_quota=0).gpu_quota == 0
    with pytest.raises(InvalidInput, match="gpu_quota is -1"):
        Queue("q", gpu_quota=-1)
