"""Troubles of a simulated world: of the sizes asked for, the same again for the same seed, none by default."""

import math
from dataclasses import replace
from itertools import islice
from statistics import fmean, stdev

import pytest

from pollux.controller import NodeAdded, NodeRemoved
from pollux.core import InvalidInput, UnknownName
from pollux.goodput import BatchLimits, Efficiency
from pollux.policies import create
from pollux.sim.simulation import simulation
from pollux.sim.simulation.disturbances import (
    Disturbances,
    JobDisturbance,
    node_failures,
    read_disturbances,
    spot_preemptions,
)
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication

TRUE = Efficiency(8, 2.0, 10.0)
MANY = 2000


def many(world: Disturbances, seed: int = 1) -> list[JobDisturbance]:
    return [JobDisturbance(world, seed, f"job-{i}") for i in range(MANY)]


def test_a_perfect_world_changes_nothing():
    calm = JobDisturbance(Disturbances(), 1, "a")
    assert calm.times(2.0, 0.5) == (2.0, 0.5)
    assert calm.noise(TRUE) is TRUE
    assert calm.remaining(30.0, 100.0) == 30.0
    assert calm.pause(3.0) == 3.0
    assert list(node_failures(Disturbances(), 1, 16)) == []


def test_step_times_err_evenly_by_one_factor():
    job = JobDisturbance(Disturbances(step_time=0.2), 1, "a")
    found = [job.times(2.0, 0.5) for _ in range(MANY)]
    factors = [step / 2.0 for step, _ in found]
    assert all(sync / 0.5 == pytest.approx(step / 2.0) for step, sync in found)
    assert 0.8 <= min(factors) < 0.81
    assert 1.19 < max(factors) <= 1.2
    assert fmean(factors) == pytest.approx(1.0, abs=0.01)


def test_only_the_scale_of_gradient_noise_errs():
    job = JobDisturbance(Disturbances(noise_scale=0.5), 1, "a")
    found = [job.noise(TRUE) for _ in range(MANY)]
    assert {(noise.initial_batch, noise.grad_sqr) for noise in found} == {(TRUE.initial_batch, TRUE.grad_sqr)}
    factors = [noise.grad_var / TRUE.grad_var for noise in found]
    assert 0.5 <= min(factors) < 0.52
    assert 1.48 < max(factors) <= 1.5


def test_pauses_err_evenly():
    job = JobDisturbance(Disturbances(start_spread=0.2), 1, "a")
    found = [job.pause(10.0) for _ in range(MANY)]
    assert 8.0 <= min(found) < 8.1
    assert 11.9 < max(found) <= 12.0


def test_what_a_job_says_it_has_left_is_off_by_one_factor_for_life():
    world = Disturbances(remaining_sigma=0.7)
    job = JobDisturbance(world, 1, "a")
    factor = job.remaining(1.0, 100.0)
    assert factor is not None
    assert [job.remaining(left, 100.0) for left in (50.0, 20.0, 0.0)] == [50.0 * factor, 20.0 * factor, 0.0]
    logs = [math.log(found) for each in many(world) if (found := each.remaining(1.0, 1.0))]
    assert fmean(logs) == pytest.approx(0.0, abs=0.05)
    assert stdev(logs) == pytest.approx(0.7, abs=0.05)


def test_as_many_are_silent_and_lie_as_asked_for():
    jobs = many(Disturbances(silent=0.1, lying=0.02, lie=0.05))
    assert fmean(job.silent for job in jobs) == pytest.approx(0.1, abs=0.02)
    assert fmean(job.lies for job in jobs) == pytest.approx(0.02, abs=0.01)
    assert {job.remaining(60.0, 200.0) for job in jobs if job.silent} == {None}
    assert {job.remaining(60.0, 200.0) for job in jobs if job.lies and not job.silent} == {0.05 * 200.0}
    assert {job.remaining(60.0, 200.0) for job in jobs if not job.lies and not job.silent} == {60.0}


def test_the_same_seed_and_name_mean_the_same_troubles():
    world = Disturbances(step_time=0.2, noise_scale=0.5, remaining_sigma=0.7, silent=0.3, start_spread=0.2)

    def drawn(seed: int, name: str) -> tuple[object, ...]:
        job = JobDisturbance(world, seed, name)
        return job.silent, job.times(1.0, 0.1), job.noise(TRUE), job.remaining(5.0, 9.0), job.pause(1.0)

    assert drawn(1, "a") == drawn(1, "a")
    assert drawn(1, "a") != drawn(2, "a")
    assert drawn(1, "a") != drawn(1, "b")


def test_one_trouble_more_leaves_the_others_as_they_were():
    few = JobDisturbance(Disturbances(step_time=0.2), 1, "a")
    more = JobDisturbance(Disturbances(step_time=0.2, silent=0.5, lying=0.5, remaining_sigma=0.7), 1, "a")
    assert [few.times(1.0, 0.1) for _ in range(5)] == [more.times(1.0, 0.1) for _ in range(5)]


def test_nodes_fail_in_order_at_the_rate_asked_for_and_none_is_spared():
    world = Disturbances(node_hours=48.0)
    found = list(islice(node_failures(world, 1, 16), MANY))
    times = [at for at, _ in found]
    assert times == sorted(times)
    assert times[-1] / MANY == pytest.approx(48.0 * 3600 / 16, rel=0.06)
    assert {node for _, node in found} == set(range(16))
    assert found == list(islice(node_failures(world, 1, 16), MANY))
    assert found != list(islice(node_failures(world, 2, 16), MANY))


@pytest.mark.parametrize("name", ["step_time", "noise_scale", "silent", "lying", "lie", "start_spread"])
@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan])
def test_shares_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidInput, match=name):
        Disturbances(**{name: value})


@pytest.mark.parametrize(
    "name", ["remaining_sigma", "node_hours", "repair_seconds", "spot_hours", "notice_seconds", "lie_rise"]
)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_sizes_out_of_range_are_refused(name, value):
    with pytest.raises(InvalidInput, match=name):
        Disturbances(**{name: value})


def test_a_creeping_lie_rises_as_the_job_works():
    liar = next(job for job in many(Disturbances(lying=0.5, lie=0.05, lie_rise=0.4)) if job.lies)
    found = [liar.remaining(left, 100.0) for left in (100.0, 50.0, 0.0)]
    assert found == pytest.approx([5.0, 6.0, 7.0])


def test_spot_nodes_are_taken_at_their_own_rate_whatever_else_fails():
    world = Disturbances(spot_hours=24.0)
    found = list(islice(spot_preemptions(world, 1, 16), MANY))
    assert found[-1][0] / MANY == pytest.approx(24.0 * 3600 / 16, rel=0.06)
    assert found == list(islice(spot_preemptions(replace(world, node_hours=9.0), 1, 16), MANY))
    assert list(spot_preemptions(Disturbances(node_hours=9.0), 1, 16)) == []


@pytest.mark.parametrize(("notice", "saved"), [(120.0, True), (0.0, False)])
def test_a_node_with_notice_closes_first_and_its_jobs_lose_nothing(monkeypatch, notice, saved):
    """One node of two is taken away at 1,000 s, under a job of 3,000 s that checkpoints once in a blue moon."""
    monkeypatch.setattr(simulation, "spot_preemptions", lambda *_: iter([(1000.0, 0), (1000.0, 0)]))
    application = FakeApplication("a", BatchLimits(10, 10, 10, 10), (3000.0,))
    workload = Workload("one", (WorkloadJob("a-0", 0.0, "a", 1, 10),))
    world = Disturbances(spot_hours=1.0, notice_seconds=notice, checkpoint_seconds=1e6, repair_seconds=50.0)
    settings = SimulationSettings(1, 1, "events", resize_seconds=0.0, disturbances=world)
    changes: list[tuple[str, float, bool]] = []

    def listen(event, commands):
        if isinstance(event, NodeAdded | NodeRemoved):
            changes.append(
                (type(event).__name__, event.at, getattr(getattr(event, "node", None), "schedulable", False))
            )

    outcome = simulate(workload, create("castor"), {"a": application}, settings, record=listen)
    gone = 1000.0 + notice
    closing = [("NodeAdded", 1000.0, False), ("NodeRemoved", gone, False), ("NodeAdded", gone + 50.0, True)]
    assert changes == closing
    # Waiting for the node: 50 s, and the controller's pause after a loss.
    lost = outcome.jobs[0].finished - 3000.0
    assert (50.0 <= lost < 200.0) if saved else lost > 1000.0


def test_disturbances_are_read_from_text():
    assert read_disturbances("step_time=0.2, node_hours=48") == Disturbances(step_time=0.2, node_hours=48.0)
    assert read_disturbances("") == Disturbances()
    with pytest.raises(UnknownName, match="did you mean 'node_hours'"):
        read_disturbances("node_hour=48")
    with pytest.raises(InvalidInput, match="lying is 'often'; give a number"):
        read_disturbances("lying=often")
