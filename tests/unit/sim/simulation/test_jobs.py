import math

import pytest

from pollux.core import NOWHERE
from pollux.goodput import BatchLimits, Efficiency
from pollux.sim.simulation.jobs import FixedBatch, LearnedBatch, Oracle, SimulatedJob, packed_step_seconds
from pollux.testing import FakeApplication, place

NOISE = Efficiency(10, 1.0, 1.0)


def simulated(application=None, batch_size=10, **fields) -> SimulatedJob:
    application = application or FakeApplication()
    return SimulatedJob("j", application, FixedBatch(application, batch_size), **fields)


def running(application=None, where="n0:1", standstill=0.0, **fields) -> SimulatedJob:
    job = simulated(application, **fields)
    job.place(place(where), standstill)
    return job


# Progress


def test_without_gpus_only_the_clock_moves():
    job = simulated()
    job.advance(60.0)
    assert (job.clock, job.progress, job.next_epoch_at()) == (60.0, 0.0, None)


def test_progress_is_counted_in_steps_of_the_initial_batch():
    job = running()
    job.advance(60.0)
    assert job.progress == pytest.approx(60.0)
    four = running(batch_size=40)
    four.advance(15.0)
    assert four.progress == pytest.approx(15.0 * 4 / 2), "a batch of 40 on one GPU is two steps of 20"


def test_a_job_stands_still_after_it_was_placed():
    job = running(standstill=30.0)
    job.advance(20.0)
    assert (job.progress, job.standstill_seconds) == (0.0, 10.0)
    job.advance(60.0)
    assert (job.progress, job.standstill_seconds) == pytest.approx((30.0, 0.0))


def test_a_second_change_starts_the_standstill_anew():
    job = running(standstill=30.0)
    job.advance(20.0)
    job.place(place("n1:1"), 30.0)
    job.advance(45.0)
    assert (job.progress, job.standstill_seconds) == (0.0, 5.0)


def test_a_stopped_job_keeps_its_progress():
    job = running()
    job.advance(60.0)
    job.place(NOWHERE, 30.0)
    job.advance(600.0)
    assert job.progress == pytest.approx(60.0)
    assert (job.batch, job.standstill_seconds) == (None, 0.0)


def test_interference_slows_down():
    job = running()
    job.advance(60.0, slowdown=0.25)
    assert job.progress == pytest.approx(45.0)


def test_a_job_is_done_at_the_end_of_its_last_epoch():
    job = running()
    job.advance(1000.0)
    assert (job.completed_at, job.epoch) == pytest.approx((200.0, 2))
    job.advance(2000.0)
    assert job.completed_at == pytest.approx(200.0)
    assert job.next_epoch_at() is None


def test_ends_of_epochs_are_rounded_to_seconds_in_the_published_world():
    application = FakeApplication(progress=(10.4, 20.8, 31.4))
    exact, rounded = running(application), running(application, whole_seconds=True)
    for job in (exact, rounded):
        job.advance(60.0)
    assert exact.completed_at == pytest.approx(31.4)
    assert rounded.completed_at == 10 + 10 + 11, "each of 10.4, 10.4 and 10.6 is rounded by itself"


def test_many_short_advances_are_one_long_one():
    long, short = running(), running()
    long.advance(150.0)
    for until in range(10, 160, 10):
        short.advance(float(until))
    assert short.progress == pytest.approx(long.progress)
    assert short.epoch == long.epoch == 1


def test_the_next_epoch_ends_after_the_standstill_and_the_rest():
    job = running(standstill=30.0)
    assert job.next_epoch_at() == pytest.approx(130.0)
    job.advance(80.0)
    assert job.next_epoch_at() == pytest.approx(130.0)
    assert job.next_epoch_at(slowdown=0.5) == pytest.approx(80.0 + 50.0 / 0.5)


@pytest.mark.parametrize("clock", [0.0, 0.1, 12_345.678, 9.87e6])
def test_the_moment_at_which_an_epoch_ends_is_late_enough(clock):
    """Rounding must not leave a remainder too small for the clock to show: a run would never get past it."""
    for tenths in range(1, 40):
        application = FakeApplication(progress=(tenths / 0.7, tenths / 0.3), compute_seconds=tenths / 30)
        job = running(application, clock=clock)
        for epoch in (1, 2):
            at = job.next_epoch_at()
            assert at is not None
            job.advance(at)
            assert job.epoch == epoch


def test_accumulated_steps_synchronise_once():
    """A batch of 40 on one GPU: two passes of one second, and one synchronisation if there were two GPUs."""
    application = FakeApplication(sync_seconds=0.5, limits=BatchLimits(10, 160, 5, 10))
    job = running(application, "n0:2", batch_size=40)
    assert job.batch is not None
    assert (job.batch.local_batch, job.batch.accumulation) == (10, 1)
    job.advance(25.0)
    assert job.progress == pytest.approx(25.0 * 4 / 2.5)


def test_remaining_samples_are_counted_at_the_initial_batch():
    job = running()
    job.advance(50.0)
    assert job.remaining_samples == pytest.approx(1500.0)


def test_samples_tell_when_the_batch_the_gpus_or_the_epoch_changed():
    job = running(batch_size=20, where="n0:2")
    job.advance(60.0)
    job.place(NOWHERE, 30.0)
    assert [(sample.at, sample.num_gpus, sample.total_batch) for sample in job.samples] == [
        (0.0, 2, 20),
        (50.0, 2, 20),
        (60.0, 0, 0),
    ]


# Batches


def test_a_fixed_batch_is_split_over_the_gpus_and_learns_nothing():
    batching = FixedBatch(FakeApplication(), 160)
    assert [batching.choose(place(f"n0:{count}")).total for count in (1, 2, 4, 8)] == [160] * 4
    batching.observe(place("n0:1"), batching.choose(place("n0:1")), (1.0, 0.0), NOISE)
    assert batching.model is None


def learned(**fields) -> LearnedBatch:
    return LearnedBatch(FakeApplication(seconds_per_sample=0.1), **fields)


def test_before_anything_is_known_the_smallest_batch_is_used():
    batching = learned()
    assert batching.model is None
    assert [batching.choose(place(f"n0:{count}")).total for count in (1, 2, 4)] == [10, 10, 20]


def test_the_first_observation_gives_a_model_that_predicts_it():
    batching, where = learned(), place("n0:1")
    batching.observe(where, batching.choose(where), (2.0, 0.0), NOISE)
    model = batching.model
    assert model is not None
    assert model.throughput.step_seconds(1.0, 1.0, 10.0) == pytest.approx(2.0, rel=0.05)


def test_only_new_keys_refit_and_only_their_first_value_counts():
    batching, where = learned(), place("n0:1")
    batch = batching.choose(where)
    batching.observe(where, batch, (2.0, 0.0), NOISE)
    first = batching.model
    batching.observe(where, batch, (9.0, 0.0), NOISE)
    assert batching.model is first
    batching.observe(place("n0:2"), batching.choose(place("n0:2")), (3.0, 1.0), NOISE)
    assert batching.model is not first


def test_noise_changes_the_model_without_a_new_fit():
    batching, where = learned(), place("n0:1")
    batch = batching.choose(where)
    batching.observe(where, batch, (2.0, 0.0), NOISE)
    first = batching.model
    batching.observe(where, batch, (2.0, 0.0), Efficiency(10, 1.0, 50.0))
    assert batching.model is not None
    assert first is not None
    assert batching.model.throughput is first.throughput
    assert batching.model.efficiency.grad_var == 50.0


def test_a_model_chooses_larger_batches_when_noise_allows():
    """Steps cost most of their time whatever the batch, so the batch pays as far as gradients are noisy."""
    totals = []
    for noise in (Efficiency(10, 1.0, 0.01), Efficiency(10, 1.0, 100.0)):
        batching, where = learned(), place("n0:4")
        for local in (5, 40):
            batch = type(batching.choose(where))(local, 0, 4)
            batching.observe(where, batch, (1.0 + 0.001 * local, 0.1), noise)
        totals.append(batching.choose(where).total)
    assert totals[0] < totals[1] <= 160


def test_an_application_that_may_not_adapt_keeps_its_batch():
    batching = learned(total=160)
    batching.observe(place("n0:1"), batching.choose(place("n0:1")), (2.0, 0.0), NOISE)
    assert batching.choose(place("n0:2")).total == 160


# Oracles


def test_packed_placements_fill_nodes():
    application = FakeApplication(sync_seconds=0.5)
    assert packed_step_seconds(application, 40, 4, gpus_per_node=4) == 1.5
    assert packed_step_seconds(application, 40, 5, gpus_per_node=4) == 2.5


def test_one_gpu_is_taken_to_accumulate_even_at_the_initial_batch():
    application = FakeApplication(seconds_per_sample=0.1)
    assert packed_step_seconds(application, 10, 1, gpus_per_node=4) == pytest.approx(2 * 1.5)
    assert packed_step_seconds(application, 10, 2, gpus_per_node=4) == pytest.approx(1.5)


def test_remaining_steps_are_counted_from_the_end_of_the_epoch():
    job = running(FakeApplication(progress=(100.0, 200.0, 300.0)))
    oracle = Oracle(job, 20, gpus_per_node=4)
    assert oracle.remaining_steps() == 100.0, "two epochs of 100, at twice the batch"
    job.advance(150.0)
    assert oracle.remaining_steps() == 50.0
    job.advance(250.0)
    assert oracle.remaining_steps() == 1.0, "in the last epoch, and beyond"
    assert math.isfinite(oracle.step_seconds(3))
