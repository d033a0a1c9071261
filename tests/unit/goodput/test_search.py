"""The searches for the best batch against each other: one placement, tables, published, brute force."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput
from pollux.goodput.batch import BatchLimits, best_batch, published_best_batch
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.fabric import FabricThroughput
from pollux.goodput.model import GoodputModel
from pollux.goodput.tables import batch_tables, goodput_tables
from pollux.goodput.throughput import PublishedThroughput, ThroughputModel, overlapped_seconds


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def throughputs(draw):
    ranges = ((1e-3, 1), (1e-5, 0.1), (1e-3, 3), (1e-6, 0.3), (1e-3, 1), (1e-6, 0.1))
    gamma = draw(st.one_of(st.sampled_from([1.0, 10.0]), st.floats(1.0, 10.0)))
    values = [*(draw(logarithmic(low, high)) for low, high in ranges), gamma]
    algorithm = draw(st.sampled_from([None, None, "ring", "tree"]))
    if algorithm is None:
        return PublishedThroughput(*values)
    return FabricThroughput(*values, algorithm=algorithm)


@st.composite
def batch_limits(draw):
    initial = draw(st.integers(8, 500))
    local_min = max(1, initial // draw(st.integers(1, 8)))
    local_max = max(2 * local_min, 16, int(initial * draw(logarithmic(0.3, 8))))
    maximum = int(initial * draw(logarithmic(2, 100)))
    return BatchLimits(initial, maximum, local_min, local_max, draw(st.booleans()))


@st.composite
def models(draw):
    limits = draw(batch_limits())
    grad_sqr = draw(st.sampled_from([0.0, 1.0, 1.0, 1.0]))
    efficiency = Efficiency(limits.initial, grad_sqr, draw(logarithmic(1e-3, 1e4)))
    return GoodputModel(draw(throughputs()), efficiency, limits)


@st.composite
def placements(draw):
    num_gpus = draw(st.integers(1, 64))
    return draw(st.integers(1, min(16, num_gpus))), num_gpus


def brute_force(model, num_nodes, num_gpus):
    """The highest goodput over all m and s whose total is within limits; 0 when there is none."""
    limits = model.limits
    local_batch = np.arange(limits.local_min, limits.local_max + 1.0)[:, None]
    most = limits.maximum // (num_gpus * limits.local_min) if limits.accumulation else 1
    accumulation = np.arange(max(most, 1.0))[None, :]
    total = num_gpus * local_batch * (accumulation + 1.0)
    allowed = (total >= max(limits.initial, limits.local_min * num_gpus)) & (total <= limits.maximum)
    if num_gpus == 1:
        allowed &= (accumulation > 0) | (total == limits.initial)
    placement = np.array([[float(num_nodes)]]), np.array([[float(num_gpus)]])
    seconds = model.throughput.step_seconds(*placement, local_batch, accumulation)
    return float(np.where(allowed, total / seconds * model.efficiency.efficiency(total), 0.0).max())


@given(model=models(), placement=placements())
def test_the_choice_keeps_every_limit_and_has_the_goodput_it_says(model, placement):
    num_nodes, num_gpus = placement
    limits = model.limits
    choice, goodput = model.best_batch(num_nodes, num_gpus)
    assume(goodput > 0.0)
    assert choice.num_gpus == num_gpus
    assert 1 <= choice.local_batch <= limits.local_max
    assert choice.total <= limits.maximum
    assert limits.accumulation or choice.accumulation == 0
    assert num_gpus > 1 or choice.total == limits.initial or choice.accumulation >= 1
    assert goodput == pytest.approx(model.goodput_at(choice, num_nodes), rel=1e-9)


@given(model=models(), placement=placements())
def test_never_below_the_published_search(model, placement):
    num_nodes, num_gpus = placement
    arguments = model.throughput, model.efficiency, model.limits, num_nodes, num_gpus
    published, reference = published_best_batch(*arguments)
    _, goodput = best_batch(*arguments)
    assert (goodput > 0.0) == (reference > 0.0)
    # The published search lets go of local_min when it accumulates, and of the initial batch when it caps.
    if published.local_batch >= model.limits.local_min and published.total >= model.limits.initial:
        assert goodput >= reference * (1 - 1e-3)


@settings(max_examples=60)
@given(model=models(), placement=placements())
def test_next_to_brute_force_over_all_batches(model, placement):
    num_nodes, num_gpus = placement
    limits = model.limits
    assume(limits.local_max * limits.maximum / (num_gpus * limits.local_min) < 2e6)
    best = brute_force(model, num_nodes, num_gpus)
    assume(best > 0.0)
    _, goodput = model.best_batch(num_nodes, num_gpus)
    assert goodput >= best * (1 - 0.002 - 1 / limits.local_max)


@pytest.mark.parametrize(
    ("throughput", "limits"),
    [
        (PublishedThroughput(0.17, 0.059, 1.39, 0.0094, 0.28, 0.0096, 1.9), BatchLimits(12, 384, 4, 12)),
        (PublishedThroughput(0.017, 7e-4, 0.12, 2.6e-3, 0.033, 9e-4, 2.07), BatchLimits(128, 4096, 32, 1024)),
        (PublishedThroughput(0.31, 0.024, 0.49, 9.8e-3, 0.084, 1.4e-3, 1.41), BatchLimits(20, 640, 10, 80)),
        (PublishedThroughput(0.187, 0.025, 0.75, 0.011, 0.128, 0.017, 1.1), BatchLimits(8, 512, 4, 8)),
    ],
    ids=["bert", "cifar10", "deepspeech2", "yolov3"],
)
def test_exact_on_published_applications(throughput, limits):
    for grad_var in (0.1, 5.0, 100.0):
        model = GoodputModel(throughput, Efficiency(limits.initial, 1.0, grad_var), limits)
        for num_gpus in (1, 2, 3, 4, 5, 8, 13, 16, 31, 64):
            num_nodes = -(-num_gpus // 4)
            best = brute_force(model, num_nodes, num_gpus)
            assert model.goodput(num_nodes, num_gpus) == pytest.approx(best, rel=1e-9)


@given(jobs=st.lists(models(), min_size=1, max_size=4), columns=st.lists(placements(), min_size=1, max_size=6))
def test_tables_agree_with_single_placements(jobs, columns):
    num_nodes, num_gpus = np.array(columns).T
    tables = batch_tables(jobs, num_nodes, num_gpus)
    np.testing.assert_array_equal(tables.goodput, goodput_tables(jobs, num_nodes, num_gpus))
    for row, model in enumerate(jobs):
        for column, (nodes, gpus) in enumerate(columns):
            choice, goodput = model.best_batch(nodes, gpus)
            assert tables.goodput[row, column] == pytest.approx(goodput, rel=1e-3, abs=1e-300)
            local_batch = int(tables.local_batch[row, column])
            accumulation = int(tables.accumulation[row, column])
            total = gpus * local_batch * (accumulation + 1)
            assert total <= model.limits.maximum
            assert (total > 0) == (choice.total > 0)
            assert accumulation == choice.accumulation or goodput > 0.0


@given(
    model=models(),
    placement=placements(),
    scale=logarithmic(1e-6, 1e6),
    grad_sqr=st.sampled_from([1e-12, 1e12]),
)
def test_extreme_scales_stay_finite(model, placement, scale, grad_sqr):
    """Times and gradients in other units change the numbers only, and raise no warning."""
    num_nodes, num_gpus = placement
    *seconds, gamma = model.throughput.parameters
    throughput = PublishedThroughput(*[value * scale for value in seconds] + [gamma])
    efficiency = Efficiency(model.limits.initial, grad_sqr, 1.0)
    extreme = GoodputModel(throughput, efficiency, model.limits)
    goodput = extreme.goodput(num_nodes, num_gpus)
    table = goodput_tables([extreme], np.array([num_nodes]), np.array([num_gpus]))
    assert math.isfinite(goodput)
    assert table[0, 0] == pytest.approx(goodput, rel=1e-3, abs=1e-300)


class SquareRootThroughput:
    """A model of someone else's: only the protocol, nothing that tables could read in bulk."""

    overlap = 2.0

    def compute_seconds(self, local_batch):
        return 0.1 + 0.01 * local_batch

    def sync_seconds(self, num_nodes, num_gpus):
        return 0.3 * (num_gpus - 1) ** 0.5

    def step_seconds(self, num_nodes, num_gpus, local_batch, accumulation=0):
        compute = self.compute_seconds(local_batch)
        sync = self.sync_seconds(num_nodes, num_gpus)
        return accumulation * compute + overlapped_seconds(compute, sync, self.overlap)


def test_tables_take_any_mixture_of_throughput_models():
    limits = BatchLimits(32, 1024, 8, 64)
    efficiency = Efficiency(32, 1.0, 4.0)
    times: list[ThroughputModel] = [
        SquareRootThroughput(),
        PublishedThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0),
        FabricThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 1.5, algorithm="tree"),
        FabricThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 1.5, algorithm="ring"),
        PublishedThroughput(0.2, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0),
    ]
    jobs = [GoodputModel(throughput, efficiency, limits) for throughput in times]
    num_nodes, num_gpus = np.array([1, 1, 2, 4]), np.array([1, 4, 8, 9])
    goodputs = goodput_tables(jobs, num_nodes, num_gpus)
    for row, job in enumerate(jobs):
        expected = [job.goodput(int(nodes), int(gpus)) for nodes, gpus in zip(num_nodes, num_gpus, strict=True)]
        np.testing.assert_allclose(goodputs[row], expected, rtol=1e-3)


def test_tables_are_the_same_however_many_jobs_are_computed_at_once():
    """More rows than fit into one pass, each with its own numbers."""
    num_nodes, num_gpus = np.array([1, 2, 16]), np.array([3, 8, 64])
    limits = BatchLimits(32, 4096, 8, 64)
    jobs = [
        GoodputModel(
            PublishedThroughput(0.1 + index * 1e-4, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0),
            Efficiency(32, 1.0, 4.0),
            limits,
        )
        for index in range(6000)
    ]
    goodputs = goodput_tables(jobs, num_nodes, num_gpus)
    assert goodputs.shape == (6000, 3)
    for index in (0, 2729, 2730, 2731, 5999):
        alone = goodput_tables([jobs[index]], num_nodes, num_gpus)
        np.testing.assert_allclose(goodputs[index], alone[0], rtol=1e-12)


def test_placements_that_do_not_exist_are_zero_and_shapes_are_checked():
    model = GoodputModel(
        PublishedThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0),
        Efficiency(32, 1.0, 4.0),
        BatchLimits(32, 64, 8, 64),
    )
    tables = batch_tables([model], np.array([0, 0, 3, 1, 1]), np.array([0, 1, 2, 1, 9]))
    assert (tables.goodput[0] > 0.0).tolist() == [False, False, False, True, False]
    assert tables.local_batch[0].tolist()[:3] == [0, 0, 0]
    assert goodput_tables([], np.array([1, 2]), np.array([1, 2])).shape == (0, 2)
    assert goodput_tables([model], np.array([]), np.array([])).shape == (1, 0)
    with pytest.raises(InvalidInput, match="same length"):
        goodput_tables([model], np.array([1, 2]), np.array([1]))
