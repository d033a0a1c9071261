"""Batch limits, the split of a fixed total, and the best batch where it can be worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.errors import InvalidInput
from pollux.goodput.batch import BatchChoice, BatchLimits, best_batch, published_best_batch, split_total
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.throughput import PublishedThroughput

BERT = BatchLimits(initial=12, maximum=384, local_min=4, local_max=12)
NO_SYNC = PublishedThroughput(0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0)
SLOW_SYNC = PublishedThroughput(0.1, 0.01, 100.0, 0.0, 100.0, 0.0, 1.0)
ALL_NOISE = Efficiency(12, 0.0, 1.0)
NO_NOISE = Efficiency(12, 1e9, 0.0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0, 10, 1, 1), "initial is 0"),
        ((12, 384, 4, 12.5), "local_max is 12.5"),
        ((12, 11, 4, 12), "maximum is 11, below initial 12"),
        ((12, 384, 13, 12), "local_max is 12, below local_min 13"),
        ((12, 384, 16, 20), "local_min is 16, above initial 12"),
    ],
)
def test_impossible_limits_are_refused(values, words):
    with pytest.raises(InvalidInput, match=words):
        BatchLimits(*values)


@pytest.mark.parametrize(
    ("total", "num_gpus", "local_batch", "accumulation"),
    [
        (12, 1, 12, 0),
        (13, 1, 7, 1),
        (24, 1, 12, 1),
        (25, 1, 9, 2),
        (24, 2, 12, 0),
        (26, 2, 7, 1),
        (100, 3, 12, 2),
        (384, 5, 10, 6),
        (384, 7, 10, 4),
    ],
)
def test_a_fixed_total_is_split_as_published(total, num_gpus, local_batch, accumulation):
    assert split_total(total, num_gpus, BERT) == BatchChoice(local_batch, accumulation, num_gpus)


def test_one_gpu_beyond_the_initial_batch_is_split_in_two_even_if_it_could_hold_all():
    limits = BatchLimits(initial=12, maximum=384, local_min=4, local_max=48)
    assert split_total(12, 1, limits) == BatchChoice(12, 0, 1)
    assert split_total(21, 1, limits) == BatchChoice(11, 1, 1)
    assert split_total(21, 2, limits) == BatchChoice(11, 0, 2)


def test_a_split_never_passes_the_maximum():
    limits = BatchLimits(initial=32, maximum=32, local_min=1, local_max=32)
    choice = split_total(32, 3, limits)
    assert (choice.local_batch, choice.accumulation, choice.total) == (10, 0, 30)


def test_a_split_without_accumulation_fills_the_gpu_at_most():
    limits = BatchLimits(initial=12, maximum=384, local_min=4, local_max=12, accumulation=False)
    assert split_total(100, 4, limits) == BatchChoice(12, 0, 4)


def test_a_split_that_leaves_gpus_empty_is_refused():
    with pytest.raises(InvalidInput, match="13 GPUs"):
        split_total(12, 13, BatchLimits(12, 12, 1, 12))
    with pytest.raises(InvalidInput):
        split_total(0, 1, BERT)


@given(total=st.integers(12, 384), num_gpus=st.integers(1, 64))
def test_a_split_covers_the_total_up_to_rounding(total, num_gpus):
    choice = split_total(total, num_gpus, BERT)
    pieces = num_gpus * (choice.accumulation + 1)
    assert choice.total <= BERT.maximum
    assert choice.total > min(total, BERT.maximum - pieces) - pieces
    assert choice.total < total + pieces + num_gpus
    assert 1 <= choice.local_batch <= BERT.local_max


def test_one_gpu_without_noise_stays_at_the_initial_batch():
    choice, goodput = best_batch(NO_SYNC, NO_NOISE, BERT, 1, 1)
    assert choice == BatchChoice(12, 0, 1)
    assert goodput == pytest.approx(12 / (0.1 + 0.01 * 12))


def test_one_gpu_beyond_the_initial_batch_takes_two_gradients():
    limits = BatchLimits(initial=12, maximum=384, local_min=4, local_max=48)
    choice, goodput = best_batch(NO_SYNC, ALL_NOISE, limits, 1, 1)
    assert (choice.local_batch, choice.accumulation) == (48, 1)
    assert goodput == pytest.approx(48 / (0.1 + 0.01 * 48))


def test_slow_synchronisation_is_paid_as_rarely_as_the_maximum_allows():
    choice, _ = best_batch(SLOW_SYNC, ALL_NOISE, BERT, 1, 2)
    assert (choice.local_batch, choice.accumulation, choice.total) == (12, 15, 384)


def test_repeats_of_full_local_batches_follow_the_closed_form():
    """a = 0.22, b = 100, φ = 1200: x* = sqrt(b·φ/(a·K·m)) = 150.8 full repeats."""
    limits = BatchLimits(initial=12, maximum=100_000, local_min=4, local_max=12)
    choice, _ = best_batch(SLOW_SYNC, Efficiency(12, 1.0, 100.0), limits, 1, 2)
    assert choice.local_batch == 12
    assert choice.accumulation + 1 in (150, 151)


def test_without_accumulation_the_batch_ends_at_full_gpus():
    limits = BatchLimits(initial=12, maximum=384, local_min=4, local_max=12, accumulation=False)
    assert best_batch(SLOW_SYNC, ALL_NOISE, limits, 1, 3)[0] == BatchChoice(12, 0, 3)
    assert best_batch(NO_SYNC, ALL_NOISE, limits, 1, 1)[0] == BatchChoice(12, 0, 1)


@pytest.mark.parametrize(
    ("limits", "num_nodes", "num_gpus"),
    [
        (BatchLimits(12, 384, 4, 12), 25, 97),
        (BatchLimits(100, 384, 4, 12, accumulation=False), 2, 8),
        (BERT, 1, 0),
        (BERT, 0, 1),
        (BERT, 3, 2),
        (BERT, -1, -1),
    ],
)
def test_where_a_job_cannot_run_goodput_is_zero(limits, num_nodes, num_gpus):
    efficiency = Efficiency(limits.initial, 1.0, 1.0)
    for search in (best_batch, published_best_batch):
        choice, goodput = search(NO_SYNC, efficiency, limits, num_nodes, num_gpus)
        assert (choice.total, goodput) == (0, 0.0)


@pytest.mark.parametrize(
    ("limits", "num_gpus", "total"),
    [
        (BatchLimits(32, 32, 8, 32), 3, 30),
        (BatchLimits(32, 32, 1, 1), 3, 30),
        (BatchLimits(20, 20, 8, 8), 1, 18),
        (BatchLimits(16, 16, 4, 8), 1, 16),
        (BatchLimits(16, 16, 4, 16, accumulation=False), 3, 15),
    ],
)
def test_a_fixed_batch_that_does_not_divide_runs_at_the_largest_below(limits, num_gpus, total):
    choice, goodput = best_batch(NO_SYNC, Efficiency(limits.initial, 1.0, 1.0), limits, 1, num_gpus)
    assert choice.total == total
    assert goodput > 0.0
