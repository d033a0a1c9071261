"""The guard rail: true divergence is seen within two or three rounds, noise and schedules are not taken for it."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.agent.adaptation.loss_guard import LossGuard, Spike
from pollux.core.errors import CheckpointMismatch, InvalidInput

CURVES = {
    "exponential": lambda t: 0.3 + 2.0 * np.exp(-t / 15.0),
    "power": lambda t: 2.0 * (1.0 + t) ** -0.5,
    "flat": lambda t: np.full(len(t), 0.8),
    "learning rate decayed": lambda t: np.where(t < len(t) // 2, 1.2, 0.7),
    "still falling": lambda t: 2.0 - 0.02 * t,
}


def watched(before, after, samples=1000, samples_after=1000):
    """The first spike, if any, of a guard that saw a change between two lists of rounds."""
    guard = LossGuard(100.0)
    for loss in before:
        guard.record(float(loss), samples)
    guard.changed()
    for loss in after:
        guard.record(float(loss), samples_after)
        if (spike := guard.verdict()) is not None:
            return spike
    return None


def noise(rng, kind, count):
    if kind == "heavy":
        return rng.standard_t(3, count)
    steps = rng.normal(size=count)
    if kind == "correlated":
        for index in range(1, count):
            steps[index] = 0.5 * steps[index - 1] + math.sqrt(0.75) * steps[index]
    return steps


@pytest.mark.parametrize("kind", ["plain", "correlated", "heavy"])
@pytest.mark.parametrize("curve", CURVES)
def test_false_alarms_are_below_one_in_a_hundred_changes(curve, kind):
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(400):
        count = int(rng.integers(8, 30))
        times = np.arange(count + 8)
        losses = CURVES[curve](times) + rng.choice([0.01, 0.05, 0.2]) * noise(rng, kind, count + 8)
        alarms += watched(losses[:count], losses[count:]) is not None
    assert alarms < 4


@pytest.mark.parametrize(("growth", "rounds"), [(1.3, 4), (2.0, 2), (10.0, 1)])
def test_divergence_is_seen_at_once(growth, rounds):
    rng = np.random.default_rng(3)
    for _ in range(100):
        before = CURVES["exponential"](np.arange(20)) + 0.03 * rng.normal(size=20)
        spike = watched(before, [before[-1] * growth**power for power in range(1, 9)])
        assert spike is not None
        assert spike.rounds <= rounds


QUIET = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]


class TestVerdict:
    def test_a_jump_must_last_two_rounds(self):
        assert watched(QUIET, [1.2, 1.0, 1.2, 1.0]) is None
        spike = watched(QUIET, [1.2, 1.2])
        assert spike is not None
        assert (spike.loss, spike.rounds) == (1.2, 2)
        assert spike.expected == pytest.approx(1.0, abs=0.02)

    def test_a_huge_jump_needs_one_round(self):
        assert watched(QUIET, [1.8]) is not None

    @pytest.mark.parametrize("loss", [math.nan, math.inf, 1e300])
    def test_a_loss_that_is_not_finite_needs_nothing_before(self, loss):
        spike = watched([], [1.0, loss])
        assert spike is not None
        assert f"became {loss}" in str(spike)

    def test_without_a_change_nothing_is_said(self):
        guard = LossGuard(100.0)
        for loss in [*QUIET, 5.0, 5.0, 50.0, math.nan]:
            guard.record(loss, 10)
            assert guard.verdict() is None

    def test_with_little_before_a_rise_is_not_judged(self):
        assert watched([1.0] * 5, [3.0, 3.0]) is None

    def test_a_loss_that_rose_before_may_rise_on(self):
        rising = [1.0 + 0.1 * index for index in range(12)]
        assert watched(rising, [2.2 + 0.1 * index for index in range(8)]) is None
        assert watched([2.1] * 12, [2.2 + 0.1 * index for index in range(8)]) is not None

    def test_a_loss_that_stops_falling_is_no_spike(self):
        assert watched([3.0 - 0.1 * index for index in range(12)], [1.9] * 8) is None

    def test_where_the_curve_is_bent_its_end_is_expected(self):
        spike = watched([*(3.0 - 0.2 * index for index in range(10)), *[1.2] * 6], [9.0])
        assert spike is not None
        assert spike.expected == pytest.approx(1.2)

    def test_smaller_rounds_may_be_noisier(self):
        assert watched(QUIET, [1.2, 1.2], samples=1000, samples_after=1000) is not None
        assert watched(QUIET, [1.2, 1.2], samples=1000, samples_after=100) is None

    def test_negative_losses_are_judged_alike(self):
        assert watched([-loss for loss in QUIET], [-0.5, -0.5]) is not None
        assert watched([-loss for loss in QUIET], [-1.2, -1.5]) is None

    def test_after_eight_rounds_a_change_is_taken_as_good(self):
        guard = LossGuard(100.0)
        for loss in QUIET:
            guard.record(loss, 10)
        guard.changed()
        for _ in range(8):
            guard.record(1.0, 10)
        assert guard.is_watching
        guard.record(9.0, 10)
        assert not guard.is_watching
        assert guard.verdict() is None

    def test_a_second_change_is_judged_by_the_rounds_after_the_first_too(self):
        guard = LossGuard(100.0)
        for loss in QUIET:
            guard.record(loss, 10)
        guard.changed()
        for loss in (0.5, 0.51, 0.49, 0.5, 0.5, 0.5):
            guard.record(loss, 10)
        guard.changed()
        assert guard.verdict() is None
        guard.record(9.0, 10)
        assert guard.verdict() is not None

    def test_the_text_has_the_figures(self):
        assert "loss 3 against 1 expected, 20.0 deviations above, in round 2" in str(Spike(3.0, 1.0, 0.1, 2))


class TestFreezing:
    def test_each_freeze_lasts_twice_as_long(self):
        guard = LossGuard(100.0)
        assert not guard.is_frozen(0.0)
        for start, length in ((1000.0, 100.0), (2000.0, 200.0), (3000.0, 400.0)):
            guard.freeze(start)
            assert guard.is_frozen(start + length - 1.0)
            assert not guard.is_frozen(start + length)
            assert guard.frozen_until == start + length
        assert guard.state_dict()["times_frozen"] == 3

    def test_undone_rounds_are_forgotten(self):
        guard = LossGuard(100.0)
        for loss in QUIET:
            guard.record(loss, 10)
        before = guard.state_dict()["before"]
        guard.changed()
        guard.record(9.0, 10)
        guard.freeze(50.0)
        assert guard.verdict() is None
        assert not guard.is_watching
        assert guard.state_dict()["before"] == before

    @pytest.mark.parametrize("length", [0.0, -1.0, math.inf, math.nan])
    def test_a_freeze_has_a_length(self, length):
        with pytest.raises(InvalidInput, match="freeze_progress is"):
            LossGuard(length)


class TestState:
    def test_a_watch_goes_on_after_json(self):
        guard = LossGuard(100.0)
        for loss in QUIET:
            guard.record(loss, 10)
        guard.freeze(7.0)
        guard.changed()
        guard.record(1.2, 10)
        other = LossGuard(100.0)
        other.load_state_dict(json.loads(json.dumps(guard.state_dict(), allow_nan=False)))
        for each in (guard, other):
            each.record(1.2, 10)
        assert other.verdict() == guard.verdict() is not None
        assert other.state_dict() == guard.state_dict()
        assert other.is_frozen(106.0)

    def test_another_version_is_refused(self):
        with pytest.raises(CheckpointMismatch, match="version None"):
            LossGuard(1.0).load_state_dict({})


@given(st.lists(st.floats(0.5, 1.5), min_size=6, max_size=30), st.floats(0.0, 0.5))
def test_a_loss_that_falls_is_never_a_spike(before, factor):
    lowest = min(before)
    assert watched(before, [lowest * factor] * 8) is None


@given(
    st.lists(st.floats() | st.sampled_from([1e308, -1e308, math.nan]), max_size=40),
    st.integers(0, 40),
)
def test_any_numbers_are_survived(losses, change):
    guard = LossGuard(1.0)
    for index, loss in enumerate(losses):
        if index == change:
            guard.changed()
        guard.record(loss, index)
        str(guard.verdict())
    json.dumps(guard.state_dict(), allow_nan=False)
