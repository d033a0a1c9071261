"""The seven published parameters: formulas against numbers worked out by hand, and both code paths."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput
from pollux.goodput.throughput import PublishedThroughput, overlapped_seconds, published_sync_basis

MODEL = PublishedThroughput(alpha_c=0.1, beta_c=0.01, alpha_n=0.5, beta_n=0.02, alpha_r=0.2, beta_r=0.03, gamma=2.0)


def test_compute_is_affine_in_the_local_batch():
    assert MODEL.compute_seconds(20.0) == pytest.approx(0.1 + 0.01 * 20)


@pytest.mark.parametrize(
    ("num_nodes", "num_gpus", "seconds"),
    [
        (1, 1, 0.0),
        (1, 2, 0.2),
        (1, 4, 0.2 + 0.03 * 2),
        (2, 2, 0.5),
        (2, 8, 0.5 + 0.02 * 6),
        (16, 64, 0.5 + 0.02 * 62),
    ],
)
def test_sync_within_a_node_and_across_nodes(num_nodes, num_gpus, seconds):
    assert MODEL.sync_seconds(float(num_nodes), float(num_gpus)) == pytest.approx(seconds)


def test_step_adds_whole_compute_times_for_accumulation():
    compute, sync = 0.3, 0.5
    step = 3 * compute + math.sqrt(compute**2 + sync**2)
    assert MODEL.step_seconds(2.0, 2.0, 20.0, 3.0) == pytest.approx(step)
    assert MODEL.step_seconds(2.0, 2.0, 20.0) == pytest.approx(math.sqrt(compute**2 + sync**2))


def test_one_gpu_takes_the_compute_time_whatever_the_overlap():
    for gamma in (1.0, 3.0, 10.0):
        model = PublishedThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.03, gamma)
        assert model.step_seconds(1.0, 1.0, 20.0) == pytest.approx(0.3, rel=1e-15)


def test_without_overlap_times_add_and_with_much_the_longer_counts():
    assert overlapped_seconds(0.3, 0.5, 1.0) == pytest.approx(0.8)
    assert overlapped_seconds(0.3, 3.0, 10.0) == pytest.approx(3.0, rel=1e-9)


@pytest.mark.parametrize(("compute", "sync"), [(1e-200, 1e200), (1e200, 1e-200), (1e-200, 1e-200), (1.0, 0.0)])
def test_overlap_neither_overflows_nor_underflows(compute, sync):
    longer = max(compute, sync)
    for gamma in (1.0, 10.0):
        scalar = overlapped_seconds(compute, sync, gamma)
        array = overlapped_seconds(np.array([compute]), np.array([sync]), gamma)
        assert longer <= scalar <= 2.0 * longer
        assert array[0] == pytest.approx(scalar, rel=1e-12)


def test_arrays_broadcast_and_agree_with_numbers():
    num_nodes = np.array([1, 1, 1, 2, 3])
    num_gpus = np.array([1, 2, 4, 2, 12])
    local_batch = np.array([[1.0], [32.0]])
    seconds = MODEL.step_seconds(num_nodes, num_gpus, local_batch, np.array([[0], [2]]))
    assert seconds.shape == (2, 5)
    for row, (batch, accumulation) in enumerate([(1.0, 0.0), (32.0, 2.0)]):
        for column in range(5):
            expected = MODEL.step_seconds(float(num_nodes[column]), float(num_gpus[column]), batch, accumulation)
            assert seconds[row, column] == pytest.approx(expected, rel=1e-13)


def test_basis_times_parameters_is_the_sync_time():
    num_nodes = np.array([1.0, 1.0, 1.0, 2.0, 16.0])
    num_gpus = np.array([1.0, 2.0, 4.0, 2.0, 64.0])
    seconds = np.array(MODEL.parameters[2:6]) @ published_sync_basis(num_nodes, num_gpus)
    np.testing.assert_allclose(seconds, MODEL.sync_seconds(num_nodes, num_gpus))


@given(
    compute=st.floats(1e-6, 1e3),
    sync=st.floats(0.0, 1e3),
    low=st.floats(1.0, 10.0),
    high=st.floats(1.0, 10.0),
)
def test_more_overlap_is_never_slower(compute, sync, low, high):
    low, high = sorted((low, high))
    more, less = overlapped_seconds(compute, sync, high), overlapped_seconds(compute, sync, low)
    assert max(compute, sync) * (1 - 1e-12) <= more <= less * (1 + 1e-12)
    assert less <= (compute + sync) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha_n": -1.0}, "alpha_n is -1"),
        ({"beta_r": math.nan}, "beta_r is nan"),
        ({"alpha_c": math.inf}, "alpha_c is inf"),
        ({"gamma": 0.5}, "gamma is 0.5"),
        ({"gamma": 11.0}, "gamma is 11"),
        ({"gamma": math.nan}, "gamma is nan"),
        ({"alpha_c": 0.0, "beta_c": 0.0}, "alpha_c and beta_c are both 0"),
    ],
)
def test_impossible_parameters_are_refused(change, words):
    values = {
        "alpha_c": 0.1,
        "beta_c": 0.01,
        "alpha_n": 0.5,
        "beta_n": 0.02,
        "alpha_r": 0.2,
        "beta_r": 0.03,
        "gamma": 2.0,
    }
    with pytest.raises(InvalidInput, match=words):
        PublishedThroughput(**{**values, **change})
