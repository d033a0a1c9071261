"""Modelled applications: their laws, and what they refuse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import InvalidInput
from pollux.goodput import BatchLimits, Efficiency, FabricThroughput, PublishedThroughput
from pollux.sim.applications.application import Application, FixedConfiguration
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule

PUBLISHED = PublishedThroughput(0.01, 0.001, 0.05, 0.002, 0.01, 0.001, 2.0)
FABRIC = FabricThroughput(0.01, 0.001, 0.05, 1e-4, 0.01, 1e-5, 1.5)

PARAMETERS = {
    "name": "toy",
    "throughput": PUBLISHED,
    "noise": NoiseSchedule(100, 1600, decays=(0.5,), step=2.0),
    "limits": BatchLimits(initial=64, maximum=1000, local_min=8, local_max=64),
    "epochs": 8,
    "steps_per_epoch": 100,
}


def application(**changes) -> Application:
    return ModelledApplication(**{**PARAMETERS, **changes})


noise_schedules = st.builds(
    NoiseSchedule,
    start=st.floats(1.0, 1e5),
    end=st.floats(1.0, 1e6),
    decays=st.lists(st.floats(0.01, 0.99), max_size=3, unique=True).map(lambda shares: tuple(sorted(shares))),
    step=st.floats(0.5, 4.0),
)
placements = st.lists(st.integers(1, 8), min_size=1, max_size=12).map(tuple)
models = st.sampled_from([PUBLISHED, FABRIC])


@given(noise=noise_schedules)
def test_noise_runs_from_start_to_end(noise):
    assert noise.at(0.0) == pytest.approx(noise.start)
    assert noise.at(1.0) == pytest.approx(noise.end)


def test_noise_jumps_at_a_decay_and_is_geometric_between():
    noise = NoiseSchedule(100, 1600, decays=(0.5,), step=4.0)
    assert noise.at(0.5) / noise.at(0.5 - 1e-12) == pytest.approx(4.0)
    assert noise.at(0.2) / noise.at(0.1) == pytest.approx(noise.at(0.9) / noise.at(0.8))
    assert noise.at(0.2) > noise.at(0.1)


@given(noise=noise_schedules, epoch=st.integers(0, 7), total=st.floats(1, 1e5))
def test_statistics_give_the_noise_scale_of_the_middle_of_the_epoch(noise, epoch, total):
    toy = application(noise=noise)
    efficiency = Efficiency(64, *toy.gradient_statistics(total, epoch))
    assert efficiency.noise_scale == pytest.approx(noise.at((epoch + 0.5) / 8))


def test_progress_counts_steps_of_the_initial_batch():
    assert application().progress == tuple(100.0 * epoch for epoch in range(1, 9))


@given(model=models, nodes=st.integers(1, 512), per_node=st.integers(1, 8), local_batch=st.integers(1, 4096))
def test_balanced_placements_take_what_the_throughput_model_says(model, nodes, per_node, local_batch):
    toy = application(throughput=model)
    step, _ = toy.step_and_sync_seconds((per_node,) * nodes, local_batch)
    expected = model.step_seconds(float(nodes), float(nodes * per_node), float(local_batch))
    assert step == pytest.approx(expected)


@given(model=models, counts=placements, local_batch=st.integers(1, 4096))
def test_step_without_sync_is_compute(model, counts, local_batch):
    step, sync = application(throughput=model).step_and_sync_seconds(counts, local_batch)
    assert step - sync == pytest.approx(model.compute_seconds(float(local_batch)))
    assert sync >= 0
    assert (sync == 0) == (sum(counts) == 1)


@given(counts=placements, local_batch=st.integers(1, 4096), data=st.data())
def test_the_order_of_nodes_does_not_matter(counts, local_batch, data):
    toy = application()
    other = tuple(data.draw(st.permutations(counts)))
    assert toy.step_and_sync_seconds(other, local_batch) == toy.step_and_sync_seconds(counts, local_batch)


def test_unbalanced_nodes_cost_as_much_as_imbalance_says():
    balanced, _ = application().step_and_sync_seconds((2, 2), 16)
    unbalanced, _ = application().step_and_sync_seconds((3, 1), 16)
    indifferent, _ = application(imbalance=0.0).step_and_sync_seconds((3, 1), 16)
    assert indifferent == balanced < unbalanced
    compute, sync = 0.026, 0.054 * (1 + 0.2 / 3)
    assert unbalanced == pytest.approx(math.hypot(compute, sync))


@given(noise=noise_schedules, total=st.integers(64, 1000), epoch=st.integers(0, 8))
def test_iterations_are_progress_over_gain(noise, total, epoch):
    toy = application(noise=noise)
    gains = [Efficiency(64, *toy.gradient_statistics(total, e)).gain(total / 64) for e in range(epoch)]
    assert toy.iterations(total, epoch) == pytest.approx(sum(100 / gain for gain in gains))


@given(total=st.integers(65, 1000))
def test_a_larger_batch_needs_fewer_steps_but_more_samples(total):
    toy = application()
    assert toy.iterations(total, 8) < toy.iterations(64, 8) == pytest.approx(800)
    assert toy.iterations(total, 8) * total > 800 * 64


def test_whole_runs_are_known_at_doublings_unless_said_otherwise():
    assert application().batch_sizes == (64, 128, 256, 512, 1000)
    assert application(limits=BatchLimits(64, 64, 8, 64)).batch_sizes == (64,)
    assert application(limits=BatchLimits(64, 128, 8, 64)).batch_sizes == (64, 128)
    assert application(batch_sizes=(64, 100)).batch_sizes == (64, 100)


def test_equal_parameters_make_equal_applications():
    known, fresh = application(), application()
    known.step_and_sync_seconds((2,), 8)
    known.iterations(128, 3)
    assert known == fresh


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 0}, "application 'toy': epochs is 0; give a whole number, 1 or more"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"max_nodes": 0}, "max_nodes is 0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0; give a finite number above 0"),
        ({"steps_per_epoch": math.inf}, "steps_per_epoch is inf"),
        ({"imbalance": -0.1}, "imbalance is -0.1; give a finite number, 0 or more"),
        ({"batch_sizes": (32, 64)}, r"batch_sizes is \(32, 64\); give ascending sizes from 64 to 1000"),
        ({"batch_sizes": (128, 64)}, "give ascending sizes"),
        ({"batch_sizes": (64, 64)}, "give ascending sizes"),
        ({"fixed": FixedConfiguration(1, 32)}, "fixed.batch_size is 32; give a batch from 64 to 1000"),
        ({"fixed": FixedConfiguration(9, 64)}, "fixed.num_gpus is 9; a batch of 64 runs on 1 to 8 GPUs"),
        ({"fixed": FixedConfiguration(0, 64)}, "fixed.num_gpus is 0"),
    ],
)
def test_bad_parameters_are_refused(changes, said):
    with pytest.raises(InvalidInput, match=said):
        application(**changes)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ((0, 100), "noise start is 0; give a finite number above 0"),
        ((100, math.nan), "noise end is nan"),
        ((100, 200, (), 0.0), "noise step is 0.0"),
        ((100, 200, (0.5, 0.5)), r"noise decays are \(0.5, 0.5\); give ascending shares"),
        ((100, 200, (0.0,)), "give ascending shares"),
        ((100, 200, (1.0,)), "give ascending shares"),
    ],
)
def test_bad_noise_is_refused(noise, said):
    with pytest.raises(InvalidInput, match=said):
        NoiseSchedule(*noise)


@pytest.mark.parametrize(
    ("counts", "local_batch", "said"),
    [((), 8, "placement is"), ((2, 0), 8, "at least one GPU on every node"), ((2,), 0, "local_batch is 0")],
)
def test_placements_without_gpus_are_refused(counts, local_batch, said):
    with pytest.raises(InvalidInput, match=said):
        application().step_and_sync_seconds(counts, local_batch)
