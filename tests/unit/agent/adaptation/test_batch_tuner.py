"""Which batch comes next: within reach, worth it, and only where the noise is known."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.adaptation.batch_tuner import LEAST_GAIN, fitting_choice, is_clear, next_batch
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.goodput import BatchChoice, BatchLimits, GoodputModel, PublishedThroughput

# A step costs 10 ms and next to nothing more per sample.
FLAT = PublishedThroughput(0.01, 1e-6, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)
STEEP = PublishedThroughput(1e-6, 0.01, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)


def estimate(phi: float, width: float = 0.3, measured: int = 200, initial: int = 16) -> NoiseEstimate:
    low, high = phi * (1 - width / 2), phi * (1 + width / 2)
    return NoiseEstimate(
        initial, phi, max(low, 0.0), high, 1.0, phi / initial, (1.0,), (phi / initial,), (True,), measured
    )


def limits(maximum: int = 1024, local: int = 1024) -> BatchLimits:
    return BatchLimits(16, maximum, 1, local)


@given(st.integers(1, 4096), st.integers(1, 16), st.one_of(st.none(), st.integers(1, 64)), st.integers(0, 3))
def test_a_total_as_it_runs(total, num_replicas, local_max, accumulation):
    choice = fitting_choice(total, num_replicas, local_max, accumulation)
    assert choice.total >= total
    assert choice.total - total < num_replicas * (choice.accumulation + 1)
    assert choice.accumulation >= accumulation
    assert local_max is None or choice.local_batch <= local_max


def test_it_doubles_where_more_is_nearly_free():
    change = next_batch(BatchChoice(16, 0, 1), estimate(500.0), FLAT, limits(), 1)
    assert change is not None
    assert change.choice.total == 32
    assert change.gain > 1.8
    assert 0.9 < change.efficiency < 1.0
    assert "500" in change.reason


@given(
    st.integers(16, 700),
    st.floats(1.0, 1e4),
    st.integers(1, 6),
    st.integers(16, 1024),
    st.integers(4, 256),
    st.floats(1e-5, 0.1),
    st.floats(1e-7, 1e-2),
)
def test_within_reach_and_worth_it(total, phi, num_replicas, maximum, local, fixed, per_sample):
    current = fitting_choice(min(total, maximum), num_replicas, local)
    model = PublishedThroughput(fixed, per_sample, 1e-4, 1e-5, 1e-4, 1e-5, 1.0)
    bounds = limits(maximum, local)
    change = next_batch(current, estimate(phi), model, bounds, 1)
    if change is None:
        return
    assert change.choice.total <= max(2 * current.total, 16)
    assert change.choice.total <= maximum
    assert change.choice.total >= 16
    assert 2 * change.choice.total >= current.total
    assert change.choice.local_batch <= local
    assert change.choice.num_gpus == num_replicas
    goodput = GoodputModel(model, estimate(phi).efficiency, bounds)
    assert goodput.goodput_at(change.choice, 1) > LEAST_GAIN * goodput.goodput_at(current, 1)


@pytest.mark.parametrize(
    "unknown",
    [
        estimate(500.0, width=1.5),
        estimate(500.0, measured=3),
        NoiseEstimate(16, math.inf, 40.0, math.inf, -1.0, 2.0, (-1.0,), (2.0,), (False,), 300),
    ],
    ids=["wide", "few", "unbounded"],
)
def test_nothing_changes_while_the_noise_is_unknown(unknown):
    assert next_batch(BatchChoice(16, 0, 1), unknown, FLAT, limits(), 1) is None


def test_nothing_changes_where_nothing_is_gained():
    assert next_batch(BatchChoice(16, 0, 1), estimate(500.0), STEEP, limits(), 1) is None
    assert next_batch(BatchChoice(16, 0, 1), estimate(500.0), FLAT, limits(maximum=16), 1) is None


def test_it_shrinks_where_the_noise_has_fallen():
    slow = PublishedThroughput(1e-3, 1e-3, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)
    change = next_batch(BatchChoice(512, 0, 1), estimate(20.0), slow, limits(), 1)
    assert change is not None
    assert 256 <= change.choice.total < 512


def test_a_rule_that_lets_a_larger_batch_move_no_further_keeps_the_batch():
    current = BatchChoice(16, 0, 1)
    assert next_batch(current, estimate(500.0), FLAT, limits(), 1) is not None
    assert next_batch(current, estimate(500.0), FLAT, limits(), 1, lambda total: 16 / total * 0.9) is None


@pytest.mark.parametrize(
    ("width", "measured", "clear"), [(0.9, 200, True), (1.1, 200, False), (0.3, 10, False), (math.inf, 200, False)]
)
def test_a_noise_scale_is_clear_where_it_is_known_to_its_own_size(width, measured, clear):
    found = estimate(500.0, width if math.isfinite(width) else 0.3, measured)
    found = found if math.isfinite(width) else dataclasses.replace(found, high=math.inf)
    assert is_clear(found) is clear
