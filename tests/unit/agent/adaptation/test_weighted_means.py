"""Exponentially weighted means against the same sums written out."""

import json
import math

import numpy as np
import pytest

from pollux.agent.adaptation.weighted_means import RunningMeans
from pollux.core.errors import CheckpointMismatch


def taken(rows, totals, factors, groups=2):
    means = RunningMeans(groups)
    for row, total, factor in zip(rows, totals, factors, strict=True):
        means.add(row, total, factor)
    return means


@pytest.fixture
def drawn():
    generator = np.random.default_rng(0)
    return generator.normal(size=(30, 6)), generator.uniform(10, 20, size=30), generator.uniform(0.8, 1.0, size=30)


def test_means_and_moments_are_those_of_the_weights(drawn):
    rows, totals, factors = drawn
    means = taken(rows, totals, factors)
    weights = np.append(np.cumprod(factors[:0:-1])[::-1], 1.0)
    assert means.weight == pytest.approx(weights.sum())
    share = weights / weights.sum()
    np.testing.assert_allclose(means.mean, share @ rows)
    assert means.total == pytest.approx(share @ totals)
    centred = rows - share @ rows
    np.testing.assert_allclose(means.moment, (centred[:, :2] * weights[:, None]).T @ centred[:, :2])
    np.testing.assert_allclose(means.group_moment, weights @ centred[:, 2:4] ** 2)
    assert means.degrees == pytest.approx(1.0 / (share**2).sum() - 1.0)
    assert means.spread == pytest.approx((share**2).sum() / (1 - (share**2).sum()) / weights.sum())


def test_equal_weights_give_the_variance_of_a_mean(drawn):
    rows, totals, _ = drawn
    means = taken(rows, totals, np.ones(30))
    np.testing.assert_allclose(means.moment * means.spread, np.cov(rows[:, :2].T) / 30)
    assert means.degrees == pytest.approx(29)


def test_one_row_has_no_spread(drawn):
    rows, totals, factors = drawn
    assert math.isinf(RunningMeans(2).spread)
    assert RunningMeans(2).degrees == 0.0
    assert math.isinf(taken(rows[:1], totals[:1], factors[:1]).spread)


def test_state_goes_through_json_and_goes_on(drawn):
    rows, totals, factors = drawn
    first = taken(rows[:20], totals[:20], factors[:20])
    other = RunningMeans.restored(json.loads(json.dumps(first.state_dict())), 2, first.count)
    for row, total, factor in zip(rows[20:], totals[20:], factors[20:], strict=True):
        other.add(row, total, factor)
    assert other.count == 30
    assert other.state_dict() == taken(rows, totals, factors).state_dict()
    with pytest.raises(CheckpointMismatch, match="do not fit 3 parameter groups"):
        RunningMeans.restored(first.state_dict(), 3, 20)
