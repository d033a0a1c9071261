"""The model bank: what it learns from running jobs, what it keeps, and that it is a value."""

import math
from dataclasses import replace

import pytest

from pollux.goodput.bank import ModelBank
from pollux.goodput.efficiency import Efficiency
from pollux.goodput.throughput import PublishedThroughput
from pollux.testing import goodput_model

MODEL = goodput_model()


def told(bank: ModelBank, kind: str, gpus: int, model=MODEL, *, batch=64, progress=100.0, at=1.0, gpu_type=""):
    """With a report from `gpus` GPUs, four on each node."""
    return bank.measured(kind, model, (gpu_type, -(-gpus // 4), gpus), batch, progress, at)


def test_nothing_is_known_of_a_kind_before_it_was_measured():
    assert ModelBank().prior("kind") is None
    assert told(ModelBank(), "kind", 4).prior("other") is None


@pytest.mark.parametrize("gpus", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("batch", [32, 64, 128])
def test_step_times_come_back_where_they_were_measured(gpus, batch):
    bank = ModelBank()
    for count in (1, 2, 4, 8, 16):
        for size in (32, 64, 128):
            bank = told(bank, "kind", count, batch=size)
    known = bank.prior("kind").goodput.throughput
    place = float(-(-gpus // 4)), float(gpus), float(batch)
    assert known.step_seconds(*place) == pytest.approx(MODEL.throughput.step_seconds(*place), rel=0.02)


def test_a_prior_says_how_much_it_rests_on():
    bank = told(told(ModelBank(), "kind", 2, at=5.0), "kind", 8, at=9.0)
    prior = bank.prior("kind")
    assert (prior.largest_gpus, prior.num_observations, prior.learned_at) == (8, 2, 9.0)
    assert [row.num_gpus for row in prior.observations] == [2, 8]
    assert prior.total is None


def test_what_is_learned_comes_back_in_a_new_bank():
    before = told(ModelBank(), "kind", 2)
    told(before, "kind", 8)
    told(before, "other", 4)
    before.ended("kind", 1e6)
    assert set(before.kinds) == {"kind"}
    assert before.prior("kind").num_observations == 1


def test_the_same_again_is_no_news():
    bank = told(ModelBank(), "kind", 4)
    assert told(bank, "kind", 4, at=99.0, progress=200.0) is bank


def test_a_time_that_moved_takes_the_place_of_the_old_one():
    slower = goodput_model(compute_seconds=0.1)
    bank = told(told(ModelBank(), "kind", 4), "kind", 4, slower, at=7.0)
    prior = bank.prior("kind")
    assert prior.num_observations == 1
    assert prior.observations[0].step_seconds == pytest.approx(slower.throughput.step_seconds(1.0, 4.0, 64.0))


def test_batches_within_half_an_octave_share_a_place():
    near = told(told(ModelBank(), "kind", 4, batch=64), "kind", 4, batch=72)
    far = told(told(ModelBank(), "kind", 4, batch=64), "kind", 4, batch=128)
    assert near.prior("kind").num_observations == 1
    assert far.prior("kind").num_observations == 2


def test_gradient_noise_is_that_of_a_job_that_begins():
    late = replace(MODEL, efficiency=Efficiency(128, 1.0, 50.0))
    bank = told(told(ModelBank(), "kind", 4, late, progress=900.0), "kind", 4, progress=10.0)
    assert bank.prior("kind").goodput.efficiency == MODEL.efficiency
    assert told(bank, "kind", 2, late, progress=500.0).prior("kind").goodput.efficiency == MODEL.efficiency


def test_gpu_types_are_kept_apart():
    fast = PublishedThroughput(0.001, 0.0001, 0.01, 0.001, 0.005, 0.0005, 2.0)
    model = replace(MODEL, by_type={"fast": fast})
    bank = told(told(ModelBank(), "kind", 4, model, gpu_type="fast"), "kind", 4, model, gpu_type="slow")
    known = bank.prior("kind").goodput
    place = 1.0, 4.0, 64.0
    assert known.throughput_on("fast").step_seconds(*place) == pytest.approx(fast.step_seconds(*place), rel=0.02)
    assert known.throughput_on("slow").step_seconds(*place) == pytest.approx(
        MODEL.throughput.step_seconds(*place), rel=0.02
    )


def test_the_whole_work_is_the_median_of_the_last_that_ended():
    bank = told(ModelBank(), "kind", 4)
    for total in (1.0, 5.0, 3.0):
        bank = bank.ended("kind", total)
    assert bank.prior("kind").total == 3.0
    for _ in range(16):
        bank = bank.ended("kind", 7.0)
    assert bank.kinds["kind"].totals == (7.0,) * 16


@pytest.mark.parametrize("total", [0.0, -1.0, math.inf, math.nan])
def test_work_that_no_job_can_have_is_not_kept(total):
    bank = told(ModelBank(), "kind", 4)
    assert bank.ended("kind", total) is bank
    assert bank.ended("never measured", 5.0) is bank


def test_rows_and_kinds_are_bounded_and_the_oldest_go():
    bank = ModelBank()
    for size in range(140):
        bank = told(bank, "kind", size + 1, at=float(size))
    rows = bank.prior("kind").observations
    assert len(rows) == 128
    assert rows[0].num_gpus == 13
    memory = bank.kinds["kind"]
    many = {f"kind-{i}": replace(memory, learned_at=1000.0 + i) for i in range(1000)}
    full = told(ModelBank.of(many), "new", 4, at=5000.0)
    assert len(full.kinds) == len(full.priors) == 1000
    assert "kind-0" not in full.kinds
    assert full.prior("new") is not None
