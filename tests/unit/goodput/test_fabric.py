"""The all-reduce model: counts of rounds and volume by hand, and both code paths."""

import math

import numpy as np
import pytest

from pollux.core.errors import InvalidInput, UnknownName
from pollux.goodput.fabric import FabricThroughput


def fabric(algorithm, **changes):
    values = {
        "alpha_c": 0.1,
        "beta_c": 0.01,
        "node_transfer": 0.4,
        "node_latency": 0.001,
        "local_transfer": 0.04,
        "local_latency": 0.0001,
        "gamma": 1.0,
    }
    return FabricThroughput(**{**values, **changes}, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_one_gpu_has_nothing_to_synchronise(algorithm):
    assert fabric(algorithm).sync_seconds(1.0, 1.0) == 0.0


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_within_a_node_both_are_a_local_ring(algorithm):
    assert fabric(algorithm).sync_seconds(1.0, 4.0) == pytest.approx(6 * 0.0001 + 2 * 3 / 4 * 0.04)


def test_a_ring_across_nodes_pays_the_node_link_for_every_gpu():
    assert fabric("ring").sync_seconds(2.0, 8.0) == pytest.approx(14 * 0.001 + 2 * 7 / 8 * 0.4)


def test_a_tree_across_nodes_pays_by_the_logarithm_and_adds_the_local_ring():
    across = 2 * math.log2(4) * 0.001 + 2 * 0.4
    within = 6 * 0.0001 + 2 * 3 / 4 * 0.04
    assert fabric("tree").sync_seconds(4.0, 16.0) == pytest.approx(across + within)
    assert fabric("tree").sync_seconds(4.0, 4.0) == pytest.approx(across)


def test_a_tree_outgrows_a_ring_in_latency():
    ring = fabric("ring", node_transfer=0.0, local_transfer=0.0)
    tree = fabric("tree", node_transfer=0.0, local_transfer=0.0)
    assert tree.sync_seconds(16.0, 64.0) < ring.sync_seconds(16.0, 64.0)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_arrays_agree_with_numbers(algorithm):
    model = fabric(algorithm, gamma=3.0)
    num_nodes = np.array([1, 1, 1, 2, 3, 16])
    num_gpus = np.array([1, 2, 4, 2, 7, 64])
    seconds = model.step_seconds(num_nodes, num_gpus, np.full(6, 8.0), np.full(6, 1.0))
    for index in range(6):
        expected = model.step_seconds(float(num_nodes[index]), float(num_gpus[index]), 8.0, 1.0)
        assert seconds[index] == pytest.approx(expected, rel=1e-13)


def test_unknown_algorithms_and_impossible_parameters_are_refused():
    with pytest.raises(UnknownName, match="did you mean 'ring'"):
        fabric("rinng")
    with pytest.raises(InvalidInput, match="node_latency is -1"):
        fabric("ring", node_latency=-1.0)
