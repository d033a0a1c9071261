"""A job's time alone: against the simulator itself, and where it must be refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core import InvalidInput, Placement
from pollux.goodput import BatchLimits, PublishedThroughput
from pollux.sim.applications.isolated import packed_counts, recorded_runs, run_seconds
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.simulation.jobs import FixedBatch, SimulatedJob
from pollux.sim.workloads.builtin import builtin_applications


def application(**changes):
    parameters = {
        "name": "toy",
        "throughput": PublishedThroughput(0.01, 0.001, 0.05, 0.002, 0.01, 0.001, 2.0),
        "noise": NoiseSchedule(100, 1000),
        "limits": BatchLimits(initial=64, maximum=1024, local_min=8, local_max=64),
        "epochs": 5,
        "steps_per_epoch": 100,
    }
    return ModelledApplication(**{**parameters, **changes})


def simulated_seconds(known, total_batch, counts):
    """The life of one simulated job that never moves, from its start."""
    job = SimulatedJob("only", known, FixedBatch(known, total_batch))
    job.place(Placement(tuple((f"node-{index}", count) for index, count in enumerate(counts))), 0.0)
    job.advance(1e9)
    return job.completed_at


@pytest.mark.parametrize(
    ("name", "total_batch", "counts"),
    [
        ("resnet-small", 512, (1,)),
        ("vit-large", 4096, (4, 4)),
        ("bert-tune", 128, (3,)),
        ("detector", 64, (4, 2)),
    ],
)
def test_agrees_with_a_simulation_of_the_job_alone(name, total_batch, counts):
    known = builtin_applications()[name]
    expected = simulated_seconds(known, total_batch, counts)
    assert run_seconds(known, total_batch, sum(counts), 4) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "total_batch", "counts"), [("cifar10", 2048, (4, 2)), ("yolov3", 64, (4,))])
def test_agrees_with_a_simulation_on_measured_times(osdi21_data, name, total_batch, counts):
    known = load_profiles(osdi21_data / "profiles")[name]
    expected = simulated_seconds(known, total_batch, counts)
    assert run_seconds(known, total_batch, sum(counts), 4) == pytest.approx(expected, rel=1e-9)


def test_one_gpu_at_the_initial_batch_computes_every_step_and_nothing_else():
    toy = application()
    assert run_seconds(toy, 64, 1, 4) == pytest.approx(500 * (0.01 + 64 * 0.001))


def test_accumulation_costs_compute_but_no_sync():
    toy = application()
    step, sync = toy.step_and_sync_seconds((2,), 64)
    gain_free = run_seconds(toy, 256, 2, 4) / toy.iterations(256, toy.epochs)
    assert gain_free == pytest.approx(step + (step - sync))


@given(num_gpus=st.integers(2, 64), batch=st.sampled_from([512, 1024]))
def test_noisier_gradients_make_a_large_batch_faster(num_gpus, batch):
    quiet = application(noise=NoiseSchedule(50, 500))
    noisy = application(noise=NoiseSchedule(500, 5000))
    assert run_seconds(noisy, batch, num_gpus, 4) < run_seconds(quiet, batch, num_gpus, 4)


@given(num_gpus=st.integers(1, 600), gpus_per_node=st.integers(1, 16))
def test_packed_counts_fill_all_nodes_but_the_last(num_gpus, gpus_per_node):
    counts = packed_counts(num_gpus, gpus_per_node)
    assert sum(counts) == num_gpus
    assert set(counts[:-1]) <= {gpus_per_node}
    assert 1 <= counts[-1] <= gpus_per_node


@pytest.mark.parametrize(
    ("total_batch", "num_gpus", "gpus_per_node", "said"),
    [
        (32, 1, 4, "total_batch 32 on 1 GPUs: outside 64 to 1024"),
        (2048, 1, 4, "outside 64 to 1024"),
        (64, 9, 4, "each GPU needs at least 8 samples; use at most 8 GPUs"),
        (64, 0, 4, "num_gpus is 0"),
        (64, 1, 0, "gpus_per_node is 0"),
    ],
)
def test_refuses_what_cannot_run(total_batch, num_gpus, gpus_per_node, said):
    with pytest.raises(InvalidInput, match=said):
        run_seconds(application(), total_batch, num_gpus, gpus_per_node)


def test_recorded_runs_leave_out_what_cannot_run():
    toy = application()
    assert toy.batch_sizes == (64, 128, 256, 512, 1024)
    runs = recorded_runs(toy, 20, 4)
    assert list(runs) == [256, 512, 1024]
    assert runs[512] == run_seconds(toy, 512, 20, 4)
    assert recorded_runs(toy, 200, 4) == {}
    with pytest.raises(InvalidInput, match="num_gpus is 0"):
        recorded_runs(toy, 0, 4)


def test_unmeasured_placements_are_refused(osdi21_data):
    cifar10 = load_profiles(osdi21_data / "profiles")["cifar10"]
    with pytest.raises(InvalidInput, match="no measurement surrounds placement"):
        run_seconds(cifar10, 4096, 100, 4)
