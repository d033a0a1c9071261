"""The estimators where the truth is known in closed form, and the interval that goes with them.

Linear regression, y = x·w* + ε, all Gaussian and standard: with e = w − w*, the gradient of one sample has the mean
e and the covariance (|e|² + 1)·I + e·eᵀ, so that lengths under any diagonal preconditioner are known at every step.
"""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pollux.agent.adaptation import noise_scale
from pollux.agent.adaptation.noise_scale import NoiseTracker, estimates, fieller
from pollux.agent.step.gradient_norms import GradientNormMeter
from pollux.core.errors import CheckpointMismatch, InvalidInput

DIMENSIONS = 20
BATCH = 28


@dataclass
class Simulation:
    """Many seeds at once: L, T and the true sqr and var (at BATCH), each of shape (steps, seeds)."""

    parts: np.ndarray
    whole: np.ndarray
    sqr: np.ndarray
    var: np.ndarray
    count: int

    def truth(self, memory=noise_scale.MEMORY):
        steps = len(self.sqr)
        weights = ((memory - 1) / (memory + 1)) ** np.arange(steps)[::-1]
        return BATCH * (weights @ self.var) / (weights @ self.sqr)

    def tracker(self, seed, steps=None):
        rows = slice(None, steps)
        tracker = NoiseTracker(BATCH, 1)
        parts, whole = self.parts[rows, seed, None], self.whole[rows, seed, None]
        tracker.add(parts, whole, np.full(len(parts), self.count), np.full(len(parts), BATCH))
        return tracker


def sizes_of(count):
    """Uneven on purpose: the first part has a third more than its share."""
    first = BATCH // count + BATCH // (3 * count)
    rest = np.array_split(np.arange(BATCH - first), count - 1)
    return [first, *(len(part) for part in rest)]


class Descent:
    """The parameters of many seeds, stepped by SGD or Adam."""

    def __init__(self, error, rate, adam):
        self.error, self.rate, self.adam = error, rate, adam
        self.first, self.second, self.steps = np.zeros_like(error), np.zeros_like(error), 0

    @property
    def denominators(self):
        if not self.adam:
            return np.ones_like(self.error)
        return np.sqrt(self.second / (1 - 0.999**self.steps)) + 1e-8

    def step(self, gradient):
        self.steps += 1
        if not self.adam:
            self.error = self.error - self.rate * gradient
            return
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        self.error = self.error - self.rate * self.first / (1 - 0.9**self.steps) / self.denominators


def simulate(seeds, steps, count, *, ratio=1.0, rate=0.0, adam=False, seed=0):
    generator = np.random.default_rng(seed)
    size = 1 / math.sqrt(ratio * BATCH - DIMENSIONS - 1)
    descent = Descent(generator.choice([-size, size], size=(seeds, DIMENSIONS)), rate, adam)
    sizes = sizes_of(count)
    rows = []
    for step in range(steps + (25 if adam else 0)):
        x = generator.normal(size=(seeds, BATCH, DIMENSIONS))
        residual = np.einsum("sbd,sd->sb", x, descent.error) - generator.normal(size=(seeds, BATCH))
        each = residual[:, :, None] * x
        means = [part.mean(axis=1) for part in np.split(each, np.cumsum(sizes)[:-1], axis=1)]
        gradient = each.mean(axis=1)
        if not adam or step >= 25:
            below = descent.denominators
            error = descent.error
            sqr = np.sum((error / below) ** 2, axis=1)
            trace = (np.sum(error**2, axis=1) + 1) * np.sum(below**-2.0, axis=1) + sqr
            local = sum(n / BATCH * np.sum((g / below) ** 2, axis=1) for n, g in zip(sizes, means, strict=True))
            rows.append((local, np.sum((gradient / below) ** 2, axis=1), sqr, trace / BATCH))
        descent.step(gradient)
    parts, whole, sqr, var = (np.array(column) for column in zip(*rows, strict=True))
    return Simulation(parts, whole, sqr, var, count)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("adam", [False, True])
def test_unbiased_with_uneven_parts(count, adam):
    simulation = simulate(500, 20, count, adam=adam, seed=count)
    sqr, var = (
        np.array(rows)
        for rows in zip(
            *(
                estimates(local[:, None], whole[:, None], np.full(500, count), np.full(500, BATCH), BATCH)
                for local, whole in zip(simulation.parts, simulation.whole, strict=True)
            ),
            strict=True,
        )
    )
    for found, true in ((sqr[:, :, 0], simulation.sqr), (var[:, :, 0], simulation.var)):
        difference = (found - true).mean(axis=0) / true.mean()
        standard_error = difference.std() / math.sqrt(500)
        assert abs(difference.mean()) < 4 * standard_error
        assert standard_error < 0.015


def test_the_total_scales_the_variance_to_the_initial_batch():
    sqr, var = estimates(
        np.array([[3.0, 1.0]]), np.array([[2.0, 0.5]]), np.array([4.0]), np.array([160.0]), initial_batch=40
    )
    assert sqr.tolist() == [[(4 * 2 - 3) / 3, (4 * 0.5 - 1) / 3]]
    assert var.tolist() == [[1.0 * 4 / 3, 0.5 * 4 / 3]]


@pytest.mark.parametrize(
    ("count", "adam", "rate"),
    [
        pytest.param(4, False, 0.0, id="still, replicas, sgd"),
        pytest.param(2, False, 0.0, id="still, halves, sgd"),
        pytest.param(3, False, 0.002, id="moving, accumulation, sgd"),
        pytest.param(2, False, 0.002, id="moving, halves, sgd"),
        pytest.param(4, True, 0.0, id="still, replicas, adam"),
        pytest.param(4, True, 0.0005, id="moving, replicas, adam"),
        pytest.param(2, True, 0.0005, id="moving, halves, adam"),
    ],
)
def test_the_interval_holds_the_truth_and_is_narrow_near_the_batch(count, adam, rate):
    simulation = simulate(100, 100, count, rate=rate, adam=adam, seed=11 * count)
    truth = simulation.truth()
    found = [simulation.tracker(seed).estimate() for seed in range(100)]
    held = [estimate.low <= true <= estimate.high for estimate, true in zip(found, truth, strict=True)]
    assert all(estimate.is_known for estimate in found)
    assert sum(held) >= 90
    assert np.median([estimate.relative_width for estimate in found]) <= 0.5
    assert np.median([estimate.noise_scale for estimate in found]) == pytest.approx(np.median(truth), rel=0.05)


@pytest.mark.parametrize("count", [2, 4])
def test_a_noise_scale_far_above_the_batch_is_never_bounded_wrongly(count):
    simulation = simulate(100, 200, count, ratio=30.0, seed=count)
    truth = simulation.truth()
    for steps in (50, 200):
        found = [simulation.tracker(seed, steps).estimate() for seed in range(100)]
        wrong = [
            math.isfinite(estimate.high) and not estimate.low <= true <= estimate.high
            for estimate, true in zip(found, truth, strict=True)
        ]
        assert not any(wrong)
        assert np.mean([estimate.low <= true for estimate, true in zip(found, truth, strict=True)]) >= 0.95
        assert np.median([estimate.low for estimate in found]) > 4 * BATCH, "an empty statement"
    assert "unknown, at least" in found[0].describe()


@pytest.mark.parametrize("adam", [False, True])
def test_the_meter_gives_what_the_simulation_computes(adam):
    generator = np.random.default_rng(1)
    descent = Descent(generator.normal(size=(1, DIMENSIONS)), 0.01, adam)
    weight = torch.nn.Parameter(torch.from_numpy(descent.error[0].copy()))
    optimizer = (torch.optim.Adam if adam else torch.optim.SGD)([weight], lr=0.01)
    meter, sizes, expected = GradientNormMeter(optimizer, "cpu"), sizes_of(3), []
    for _ in range(60):
        x, noises = generator.normal(size=(BATCH, DIMENSIONS)), generator.normal(size=BATCH)
        each = (x @ descent.error[0] - noises)[:, None] * x
        parts = np.split(each, np.cumsum(sizes)[:-1])
        if not adam or descent.steps >= 20:
            below = descent.denominators[0]
            local = sum(len(part) / BATCH * np.sum((part.mean(axis=0) / below) ** 2) for part in parts)
            expected.append((local, np.sum((each.mean(axis=0) / below) ** 2)))
        assert meter.is_warm == (not adam or descent.steps >= 20)
        optimizer.zero_grad()
        rows = torch.from_numpy(np.column_stack([x, noises])).split(sizes)
        for part in rows:
            if meter.is_warm:
                meter.start_measuring(BATCH / len(part))
            loss = 0.5 * (part[:, :-1] @ weight - part[:, -1]).square().sum() / BATCH
            loss.backward()
            meter.stop_measuring()
        if meter.is_warm:
            meter.close_row(len(sizes), BATCH)
        optimizer.step()
        descent.step(each.mean(axis=0)[None])
    drained = meter.drain()
    table = np.array(expected)
    np.testing.assert_allclose(drained.parts[:, 0], table[:, 0], rtol=1e-10)
    np.testing.assert_allclose(drained.whole[:, 0], table[:, 1], rtol=1e-10)
    trackers = [NoiseTracker(BATCH, 1), NoiseTracker(BATCH, 1)]
    trackers[0].add(*drained)
    trackers[1].add(table[:, :1], table[:, 1:], np.full(len(table), 3), np.full(len(table), BATCH))
    assert trackers[0].estimate().high == pytest.approx(trackers[1].estimate().high, rel=1e-9)


def rows(num, groups=2, seed=0):
    generator = np.random.default_rng(seed)
    whole = generator.uniform(1.0, 2.0, size=(num, groups))
    return whole * generator.uniform(1.2, 1.9, size=(num, groups)), whole, np.full(num, 4), np.full(num, 64)


def test_means_are_those_of_the_weights():
    parts, whole, counts, _ = rows(50)
    totals = np.where(np.arange(50) % 2, 64, 320)
    tracker = NoiseTracker(64, 2, memory=30.0)
    assert tracker.add(parts, whole, counts, totals) == 50
    factors = (29 / 31) ** np.minimum(totals / 64, 2.0)
    weights = np.append(np.cumprod(factors[:0:-1])[::-1], 1.0)
    weights /= weights.sum()
    sqr, var = estimates(parts, whole, counts, totals, 64)
    found = tracker.estimate()
    assert found.group_sqr == pytest.approx(weights @ sqr)
    assert found.group_var == pytest.approx(weights @ var)
    assert found.grad_sqr == pytest.approx((weights @ sqr).sum())
    total = np.stack([sqr.sum(axis=1), var.sum(axis=1)])
    centred = total - (total @ weights)[:, None]
    concentration = (weights**2).sum()
    cov = (centred * weights) @ centred.T * concentration / (1 - concentration)
    quantile = stats.t.ppf(0.975, 1 / concentration - 1)
    low, high = fieller(found.grad_var, found.grad_sqr, cov.tolist(), quantile)
    assert (found.low, found.high) == pytest.approx((64 * low, 64 * high), rel=1e-4)
    assert found.noise_scale == pytest.approx(64 * found.grad_var / found.grad_sqr)
    assert found.relative_width == pytest.approx((found.high - found.low) / found.noise_scale)


@pytest.mark.parametrize(("ratio", "level"), [(8.0, 0.975), (12.0, 0.9995)])
def test_an_upper_limit_far_above_the_batch_needs_more_evidence(ratio, level):
    generator = np.random.default_rng(0)
    whole = 1.0 + ratio + generator.normal(size=(100, 1))
    parts = 1.0 + 4 * ratio + generator.normal(size=(100, 1))
    tracker = NoiseTracker(64, 1, memory=1e9)
    tracker.add(parts, whole, np.full(100, 4), np.full(100, 64))
    sqr, var = estimates(parts, whole, np.full(100, 4), np.full(100, 64), 64)
    cov = np.cov(np.concatenate([sqr, var], axis=1).T) / 100
    found = tracker.estimate()
    assert found.noise_scale / 64 == pytest.approx(ratio, rel=0.15)
    limits = [fieller(var.mean(), sqr.mean(), cov.tolist(), stats.t.ppf(each, 99)) for each in (0.975, level)]
    assert (found.low / 64, found.high / 64) == pytest.approx((limits[0][0], limits[1][1]), rel=1e-3)


@pytest.mark.parametrize("degrees", [8, 30, 200])
@pytest.mark.parametrize("level", [0.975, 0.9995])
def test_quantiles(degrees, level):
    exact = stats.t.ppf(level, degrees)
    assert noise_scale._student(stats.norm.ppf(level), degrees) == pytest.approx(exact, rel=0.02)
    assert noise_scale._student(stats.norm.ppf(level), 100) == pytest.approx(stats.t.ppf(level, 100), rel=1e-4)


finite = st.floats(-10.0, 10.0)


@given(var=finite, sqr=finite, a=st.floats(0.01, 3.0), b=st.floats(0.01, 3.0), correlation=st.floats(-0.99, 0.99))
def test_fieller_is_the_set_of_ratios_that_are_not_refused(var, sqr, a, b, correlation):
    cov = [[a * a, correlation * a * b], [correlation * a * b, b * b]]
    low, high = fieller(var, sqr, cov, 2.0)
    assert 0.0 <= low <= high

    def margin(ratio):
        """Above zero where the ratio is refused."""
        variance = cov[1][1] - 2 * ratio * cov[0][1] + ratio**2 * cov[0][0]
        return (var - ratio * sqr) ** 2 - 4.0 * variance

    for ratio in np.geomspace(1e-3, 1e3, 200):
        if margin(ratio) < -1e-6 * (1 + ratio**2):
            assert low * (1 - 1e-6) <= ratio <= high * (1 + 1e-6)
    for edge in (low, high):
        if 0.0 < edge < 1e4:
            assert margin(edge) == pytest.approx(0.0, abs=1e-5 * (1 + edge**2) * (1 + var**2 + sqr**2))


def test_fieller_where_nothing_can_be_said():
    everything = (0.0, math.inf)
    assert fieller(0.1, 0.1, [[1.0, 0.0], [0.0, 1.0]], 2.0) == everything
    assert fieller(1.0, 0.0, [[0.0, 0.0], [0.0, 0.0]], 2.0) == everything
    assert fieller(5.0, -5.0, [[0.1, 0.0], [0.0, 0.1]], 2.0) == everything
    low, high = fieller(5.0, 0.1, [[0.1, 0.0], [0.0, 0.1]], 2.0)
    assert low == pytest.approx(5.0 / (0.1 + 2 * math.sqrt(0.1)), rel=0.1)
    assert math.isinf(high)


def test_unusable_rows_are_dropped_and_counted():
    parts, whole, counts, totals = rows(6)
    parts[0, 1], whole[1, 0], counts[2], totals[3] = math.inf, math.nan, 1, 0
    tracker = NoiseTracker(64, 2)
    assert tracker.add(parts, whole, counts, totals) == 2
    assert (tracker.num_measured, tracker.num_dropped) == (2, 4)
    reference = NoiseTracker(64, 2)
    reference.add(*(column[4:] for column in (parts, whole, counts, totals)))
    assert tracker.estimate() == reference.estimate()


def test_no_or_few_rows_say_nothing():
    tracker = NoiseTracker(64, 2)
    empty = tracker.estimate()
    assert (empty.low, empty.high, empty.is_known) == (0.0, math.inf, False)
    assert empty.describe() == "noise scale unknown after 0 measured steps"
    assert empty.gain(8.0) == empty.gain(8.0, 1) == pytest.approx(1.0, abs=1e-5)
    tracker.add(*rows(1))
    assert math.isinf(tracker.estimate().high)
    tracker.add(*rows(noise_scale.MIN_MEASURED - 2))
    few = tracker.estimate()
    assert math.isfinite(few.high)
    assert not few.is_known
    tracker.add(*rows(1))
    assert tracker.estimate().is_known


def test_describe_for_people():
    tracker = NoiseTracker(6400, 2)
    parts, whole, counts, _ = rows(120)
    tracker.add(parts, whole, counts, np.full(120, 6400))
    text = tracker.estimate().describe()
    assert text.startswith("noise scale ")
    assert text.endswith("after 120 measured steps")
    assert "(95 %: " in text
    assert "," in text.split("(")[0], "thousands are told apart"


def test_negative_signal_means_an_infinite_noise_scale():
    tracker = NoiseTracker(64, 1)
    generator = np.random.default_rng(0)
    whole = generator.uniform(1.0, 2.0, size=(40, 1))
    tracker.add(whole * 4.5, whole, np.full(40, 4), np.full(40, 64))
    estimate = tracker.estimate()
    assert estimate.grad_sqr < 0.0
    assert math.isinf(estimate.noise_scale)
    assert math.isinf(estimate.relative_width)
    assert estimate.efficiency.efficiency(640.0) == pytest.approx(1.0)


def test_gain_is_by_the_group_where_that_is_known():
    tracker = NoiseTracker(64, 3)
    generator = np.random.default_rng(0)
    whole = generator.uniform(0.9, 1.1, size=(60, 3))
    parts = whole * [1.5, 3.0, 1.0]
    whole[:, 2], parts[:, 2] = generator.normal(size=60) * 0.01, 0.01
    tracker.add(parts, whole, np.full(60, 4), np.full(60, 64))
    estimate = tracker.estimate()
    assert estimate.group_known == (True, True, False)
    for group in (0, 1):
        sqr, var = estimate.group_sqr[group], estimate.group_var[group]
        assert estimate.gain(4.0, group) == pytest.approx((var + sqr) / (var / 4 + sqr))
    assert estimate.gain(4.0, 2) == estimate.gain(4.0)
    assert estimate.gain(4.0, 0) < estimate.gain(4.0) < estimate.gain(4.0, 1)


def test_efficiency_does_not_depend_on_the_unit_of_length():
    found = []
    for unit in (1.0, 1e-12, 1e12):
        tracker = NoiseTracker(64, 2)
        parts, whole, counts, totals = rows(50)
        tracker.add(parts * unit, whole * unit, counts, totals)
        found.append(tracker.estimate())
    for estimate in found:
        phi = estimate.noise_scale
        assert estimate.efficiency.efficiency(512.0) == pytest.approx((phi + 64) / (phi + 512))
        assert estimate.cautious_efficiency.efficiency(512.0) == pytest.approx(
            (estimate.low + 64) / (estimate.low + 512)
        )
        assert estimate.high == pytest.approx(found[0].high)


def test_restart_forgets_and_can_change_the_groups():
    tracker = NoiseTracker(64, 2)
    tracker.add(*rows(30))
    tracker.restart("another optimiser", num_groups=3)
    assert (tracker.num_measured, tracker.num_groups, tracker.last_restart) == (0, 3, "another optimiser")
    tracker.add(*rows(30, groups=3))
    assert len(tracker.estimate().group_sqr) == 3


def test_state_goes_through_json_and_goes_on():
    tracker, whole = NoiseTracker(64, 2), NoiseTracker(64, 2)
    whole.add(*rows(40))
    tracker.add(*(column[:25] for column in rows(40)))
    restored = NoiseTracker(64, 1)
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert restored.estimate() == tracker.estimate()
    restored.add(*(column[25:] for column in rows(40)))
    assert restored.estimate() == whole.estimate()
    assert restored.state_dict() == whole.state_dict()


def test_a_state_of_another_job_is_refused():
    state = NoiseTracker(64, 2).state_dict()
    with pytest.raises(CheckpointMismatch, match="initial batch of 64, this job's is 32"):
        NoiseTracker(32, 2).load_state_dict(state)
    tracker = NoiseTracker(64, 2)
    with pytest.raises(CheckpointMismatch, match="do not fit 3 parameter groups"):
        tracker.load_state_dict({**state, "num_groups": 3})
    assert tracker.num_groups == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1), "initial_batch is 0"),
        ((8, 0), "num_groups is 0"),
        ((8, 1, 1.0), "memory is 1.0"),
        ((8, 1, math.inf), "memory"),
    ],
)
def test_bad_settings(arguments, said):
    with pytest.raises(InvalidInput, match=said):
        NoiseTracker(*arguments)


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_rows_of_another_shape_are_refused(wrong):
    columns = list(rows(5))
    columns[wrong] = columns[wrong][:4]
    with pytest.raises(InvalidInput, match="rows of shapes"):
        NoiseTracker(64, 2).add(*columns)


def drawn(generator, phi, num, sqr=1.0, total=BATCH, dimensions=50):
    """Rows of two halves of a gradient whose squared length and noise scale are these."""
    spread = math.sqrt(phi * sqr / (total / 2) / dimensions)
    halves = math.sqrt(sqr / dimensions) + spread * generator.normal(size=(2, num, dimensions))
    parts, whole = (halves**2).sum(axis=2).mean(axis=0), (halves.mean(axis=0) ** 2).sum(axis=1)
    return parts[:, None], whole[:, None], np.full(num, 2), np.full(num, total)


@pytest.mark.parametrize("total", [2 * BATCH, 8 * BATCH])
def test_a_noise_scale_that_grows_while_gradients_shrink_is_followed(total):
    behind, drifts = [], 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        tracker, rigid = NoiseTracker(BATCH, 1), NoiseTracker(BATCH, 1)
        rigid._has_drifted = lambda: False  # type: ignore[method-assign]
        for part in [0.0] * 10 + [*np.linspace(0.0, 1.0, 15)]:
            phi = 2 * BATCH * 10**part
            grown = drawn(generator, phi, 10, sqr=30**-part, total=total)
            tracker.add(*grown)
            rigid.add(*grown)
        drifts += tracker.num_drifts
        behind.append((tracker.estimate().noise_scale / phi, rigid.estimate().noise_scale / phi))
    followed, lagged = np.median(behind, axis=0)
    assert drifts >= 10
    assert lagged < 0.3
    assert followed > 1.5 * lagged


def test_a_noise_scale_that_falls_is_followed_too():
    generator = np.random.default_rng(0)
    tracker = NoiseTracker(BATCH, 1)
    tracker.add(*drawn(generator, 8 * BATCH, 200))
    tracker.add(*drawn(generator, BATCH, 120))
    assert tracker.num_drifts >= 1
    assert tracker.estimate().noise_scale == pytest.approx(BATCH, rel=0.4)


@pytest.mark.parametrize("ratio", [1.0, 5.0, 30.0])
def test_a_noise_scale_that_stays_is_seldom_taken_to_drift(ratio):
    drifts, held, wrong = 0, [], 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        tracker = NoiseTracker(BATCH, 1)
        for _ in range(10):
            tracker.add(*drawn(generator, ratio * BATCH, 60))
            found = tracker.estimate()
            held.append(found.low <= ratio * BATCH <= found.high)
            wrong += math.isfinite(found.high) and not held[-1]
        drifts += tracker.num_drifts
    assert drifts <= 5, "in 6,000 rows"
    assert np.mean(held) >= 0.9
    assert ratio < 30.0 or wrong == 0


def test_what_is_left_after_a_drift_is_the_recent_rows():
    generator = np.random.default_rng(1)
    tracker = NoiseTracker(BATCH, 1)
    tracker.add(*drawn(generator, BATCH, 300))
    assert (tracker.num_measured, tracker.num_drifts) == (300, 0)
    for _ in range(60):
        tracker.add(*drawn(generator, 5 * BATCH, 1, sqr=0.1))
        if tracker.num_drifts:
            break
    assert tracker.num_drifts == 1
    assert tracker.num_measured == noise_scale.RECENT
    sharp = tracker.estimate()
    assert sharp.noise_scale > 1.4 * BATCH
    tracker.add(*drawn(generator, 5 * BATCH, 1, sqr=0.1))
    assert tracker.num_measured == noise_scale.RECENT + 1


def test_a_state_of_before_there_were_recent_rows_is_taken():
    tracker = NoiseTracker(64, 2)
    tracker.add(*rows(90))
    state = {key: value for key, value in tracker.state_dict().items() if key not in ("recent", "num_drifts")}
    restored = NoiseTracker(64, 2)
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert restored.estimate() == tracker.estimate()
    restored.add(*rows(90, seed=1))
    tracker.add(*rows(90, seed=1))
    assert restored.estimate() == tracker.estimate()
