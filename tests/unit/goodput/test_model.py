"""A job's whole model: what it adds to its parts."""

import pytest

from pollux.core import GoodputFunction
from pollux.core.errors import InvalidInput
from pollux.goodput.batch import BatchChoice, BatchLimits, best_batch
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.model import GoodputModel
from pollux.goodput.throughput import PublishedThroughput

SLOW = PublishedThroughput(0.1, 0.01, 0.5, 0.02, 0.2, 0.01, 2.0)
FAST = PublishedThroughput(0.05, 0.005, 0.5, 0.02, 0.2, 0.01, 2.0)
EFFICIENCY = Efficiency(32, 1.0, 4.0)
LIMITS = BatchLimits(32, 1024, 8, 64)
MODEL = GoodputModel(SLOW, EFFICIENCY, LIMITS, {"a100": FAST})


def test_goodput_is_throughput_times_efficiency():
    choice = BatchChoice(local_batch=20, accumulation=1, num_gpus=4)
    seconds = SLOW.step_seconds(1.0, 4.0, 20.0, 1.0)
    assert MODEL.goodput_at(choice, 1) == pytest.approx(160 / seconds * (128 + 32) / (128 + 160))


def test_one_gpu_at_the_initial_batch_is_plain_training():
    model = GoodputModel(SLOW, Efficiency(32, 1e9, 0.0), LIMITS)
    choice, goodput = model.best_batch(1, 1)
    assert choice == BatchChoice(32, 0, 1)
    assert model.efficiency_at(choice.total) == 1.0
    assert goodput == pytest.approx(32 / SLOW.compute_seconds(32.0), rel=1e-12)


def test_types_measured_apart_have_their_own_throughput():
    assert MODEL.goodput(1, 4, "a100") == best_batch(FAST, EFFICIENCY, LIMITS, 1, 4)[1]
    assert MODEL.goodput(1, 4, "never seen") == MODEL.goodput(1, 4) == best_batch(SLOW, EFFICIENCY, LIMITS, 1, 4)[1]
    assert MODEL.goodput(1, 4, "a100") > MODEL.goodput(1, 4)


def test_most_gpus_are_those_that_can_have_the_smallest_local_batch():
    assert MODEL.max_gpus == 128
    assert MODEL.goodput(32, 128) > 0.0
    assert MODEL.goodput(32, 129) == 0.0


def test_both_parts_must_mean_the_same_initial_batch():
    with pytest.raises(InvalidInput, match="relative to a batch of 64"):
        GoodputModel(SLOW, Efficiency(64, 1.0, 4.0), LIMITS)


def test_policies_can_use_it_as_a_goodput_function():
    function: GoodputFunction = MODEL
    assert function.goodput(2, 8, "a100") > 0.0
