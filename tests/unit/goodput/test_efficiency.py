"""Statistical efficiency: the law, its exact ends, and what is clamped or refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput
from pollux.goodput.efficiency import Efficiency


def test_noise_scale_gain_and_efficiency_by_hand():
    efficiency = Efficiency(initial_batch=100, grad_sqr=2.0, grad_var=6.0)
    assert efficiency.noise_scale == pytest.approx(300.0)
    assert efficiency.gain(4.0) == pytest.approx((6 + 2) / (6 / 4 + 2))
    assert efficiency.efficiency(400.0) == pytest.approx((300 + 100) / (300 + 400))


def test_at_the_initial_batch_efficiency_and_gain_are_one():
    for grad_sqr, grad_var in ((0.0, 1.0), (1.0, 0.0), (3.0, 5.0), (1e300, 1e300)):
        efficiency = Efficiency(32, grad_sqr, grad_var)
        assert efficiency.efficiency(32.0) == 1.0
        assert efficiency.gain(1.0) == 1.0


def test_without_signal_every_sample_counts():
    efficiency = Efficiency(32, 0.0, 1.0)
    assert efficiency.noise_scale == math.inf
    assert efficiency.efficiency(32_000.0) == 1.0
    assert efficiency.gain(1000.0) == 1000.0


def test_without_noise_a_larger_batch_is_worth_nothing_more():
    assert Efficiency(32, 1e9, 0.0).gain(50.0) == pytest.approx(1.0)


def test_estimates_below_zero_are_clamped():
    clamped = Efficiency.from_estimates(32, -3.0, -2.0)
    assert (clamped.grad_sqr, clamped.grad_var) == (0.0, 1e-6)
    assert Efficiency(32, 1.0, 0.0).grad_var == 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("name", ["grad_sqr", "grad_var"])
def test_impossible_statistics_are_refused(name, bad):
    with pytest.raises(InvalidInput, match=name):
        Efficiency(**{"initial_batch": 32, "grad_sqr": 1.0, "grad_var": 1.0, name: bad})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_estimates_that_are_not_finite_are_refused_too(bad):
    with pytest.raises(InvalidInput):
        Efficiency.from_estimates(32, 1.0, bad)
    with pytest.raises(InvalidInput):
        Efficiency.from_estimates(32, bad, 1.0)


@pytest.mark.parametrize("bad", [0, -4, math.nan, math.inf])
def test_an_initial_batch_without_samples_is_refused(bad):
    with pytest.raises(InvalidInput, match="initial_batch"):
        Efficiency(bad, 1.0, 1.0)


@given(
    grad_sqr=st.floats(0.0, 1e15),
    grad_var=st.floats(0.0, 1e15),
    scales=st.lists(st.floats(1.0, 1e6), min_size=2, max_size=2),
)
def test_efficiency_falls_and_gain_rises_with_the_batch(grad_sqr, grad_var, scales):
    efficiency = Efficiency(16, grad_sqr, grad_var)
    small, large = sorted(scales)
    assert 0.0 < efficiency.efficiency(16 * large) <= efficiency.efficiency(16 * small) <= 1.0
    assert efficiency.gain(small) <= efficiency.gain(large) * (1 + 1e-9)


def test_arrays_are_answered_with_arrays():
    totals = np.array([100.0, 200.0])
    np.testing.assert_allclose(Efficiency(100, 1.0, 1.0).efficiency(totals), [1.0, 2 / 3])
