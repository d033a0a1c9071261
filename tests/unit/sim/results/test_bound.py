"""The lower bound: never above the best schedule that an exhaustive search finds, and as near as it should be."""

import random
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.core import InvalidInput
from pollux.goodput import BatchLimits, Efficiency
from pollux.sim.applications.application import FixedConfiguration
from pollux.sim.applications.isolated import recorded_runs
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.applications.profiles import load_profiles
from pollux.sim.results.best_rates import TOLERANCE, best_rates
from pollux.sim.results.bound import completion_bound
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing import FakeApplication, goodput_model

MARGIN = 1.0 + TOLERANCE


def workload(*jobs: tuple[float, str]) -> Workload:
    return Workload("tiny", tuple(WorkloadJob(f"j{i}", at, name, 1, 10) for i, (at, name) in enumerate(jobs)))


def one_batch(name: str, steps: float, **more) -> FakeApplication:
    """Runs at a total batch of 10 alone, so that what it does on so many GPUs can be said by hand."""
    return FakeApplication(name, BatchLimits(10, 10, 2, 10), (steps,), **more)


def best_on_one_machine(jobs: tuple[tuple[int, int], ...]) -> float:
    """Least average completion time of (arrival, seconds) on one machine, over all schedules by whole seconds."""

    @cache
    def best(now: int, left: tuple[int, ...]) -> int:
        waiting = [i for i, seconds in enumerate(left) if seconds and jobs[i][0] <= now]
        unfinished = sum(1 for seconds in left if seconds)
        if not unfinished:
            return 0
        if not waiting:
            return sum(1 for i, s in enumerate(left) if s and jobs[i][0] <= now) + best(now + 1, left)
        present = len(waiting)
        return present + min(best(now + 1, tuple(s - (i == chosen) for i, s in enumerate(left))) for chosen in waiting)

    return best(0, tuple(seconds for _, seconds in jobs)) / len(jobs)


def best_on_gpus(jobs: tuple[tuple[int, str], ...], rates: dict[str, tuple[float, ...]], work, gpus: int) -> float:
    """Least average completion time over all ways to hand out whole GPUs anew every second, for nothing."""

    @cache
    def best(now: int, left: tuple[float, ...]) -> float:
        present = [i for i, amount in enumerate(left) if amount > 1e-9 and jobs[i][0] <= now]
        if not any(amount > 1e-9 for amount in left):
            return 0.0
        if not present:
            return best(now + 1, left)
        found = float("inf")
        for counts in product(range(gpus + 1), repeat=len(present)):
            # A schedule that leaves GPUs idle which a job could use is never better.
            if sum(counts) != gpus:
                continue
            after, spent = list(left), 0.0
            for i, count in zip(present, counts, strict=True):
                rate = rates[jobs[i][1]][count]
                spent += min(left[i] / rate, 1.0) if rate else 1.0
                after[i] = max(round(left[i] - rate, 9), 0.0)
            if any(a < b for a, b in zip(after, left, strict=True)):
                found = min(found, spent + best(now + 1, tuple(after)))
        return found

    return best(0, tuple(work[name] for _, name in jobs)) / len(jobs)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4))
def test_one_gpu_is_one_machine_that_serves_the_shortest_remaining_first(jobs):
    applications = {f"a{seconds}": one_batch(f"a{seconds}", float(seconds)) for seconds in range(1, 5)}
    chosen = tuple(sorted(jobs))
    bound = completion_bound(
        workload(*((float(at), f"a{seconds}") for at, seconds in chosen)),
        applications,
        SimulationSettings(1, 1, "events"),
    )
    assert bound.shared * MARGIN == pytest.approx(best_on_one_machine(chosen), rel=0.02)
    assert bound.seconds <= best_on_one_machine(chosen) * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), min_size=1, max_size=3),
    st.floats(0.0, 2.0),
    st.integers(1, 4),
)
def test_never_above_the_best_schedule_of_all(jobs, sync_seconds, gpus):
    applications = {
        "a": one_batch("a", 3.0, compute_seconds=0.0, seconds_per_sample=0.1, sync_seconds=0.1 * sync_seconds),
        "b": one_batch("b", 2.0, compute_seconds=0.5, seconds_per_sample=0.1, sync_seconds=sync_seconds),
    }

    def rate(name: str, count: int) -> float:
        application = applications[name]
        if not count:
            return 0.0
        local = 10 // count
        step, _ = application.step_and_sync_seconds((count,), local)
        return count * local / 10 / step

    # A job need not use all that it is given; a total of 10 on 3 or 4 GPUs leaves some out.
    rates = {
        name: (0.0, *(max(rate(name, k) for k in range(1, count + 1)) for count in range(1, gpus + 1)))
        for name in applications
    }
    chosen = tuple(sorted(jobs))
    best = best_on_gpus(chosen, rates, {"a": 3.0, "b": 2.0}, gpus)
    bound = completion_bound(
        workload(*((float(at), name) for at, name in chosen)), applications, SimulationSettings(1, gpus, "events")
    )
    assert bound.seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_job_alone_takes_what_its_best_run_takes(gpus):
    application = FakeApplication("a", seconds_per_sample=0.05, sync_seconds=0.3)
    bound = completion_bound(workload((0.0, "a")), {"a": application}, SimulationSettings(1, gpus, "events"))
    recorded = min(min(recorded_runs(application, count, gpus).values()) for count in range(1, gpus + 1))
    assert bound.alone <= recorded
    assert bound.seconds >= bound.alone
    assert bound.shared <= bound.alone


def test_a_fixed_configuration_gets_no_more_than_it_has():
    free = one_batch("a", 100.0, seconds_per_sample=0.1)
    fixed = one_batch("a", 100.0, seconds_per_sample=0.1, fixed=FixedConfiguration(1, 10))
    limits = SimulationSettings(1, 4, "events")
    quick = completion_bound(workload((0.0, "a")), {"a": free}, limits)
    slow = completion_bound(workload((0.0, "a")), {"a": fixed}, limits)
    assert slow.alone == pytest.approx(200.0 / MARGIN)
    assert quick.alone < 0.8 * slow.alone


@pytest.mark.parametrize("policy", ["pollux", "castor", "srtf"])
def test_no_policy_beats_it(policy):
    from pollux.policies import create

    application = FakeApplication("a", seconds_per_sample=0.02, sync_seconds=0.1, grad_sqr=0.05)
    jobs = workload(*((30.0 * i, "a") for i in range(8)))
    world = SimulationSettings(1, 4, "events", resize_seconds=0.0)
    outcome = simulate(jobs, create(policy), {"a": application}, world)
    average = sum(job.finished - job.submitted for job in outcome.jobs) / len(outcome.jobs)
    assert completion_bound(jobs, {"a": application}, world).seconds <= average


# Configurations that a job may have in a simulation, at random: the bound is never below what they make of a job.


def modelled(imbalance: float) -> ModelledApplication:
    model = goodput_model()
    noise = NoiseSchedule(300.0, 3000.0, (0.5,), 4.0)
    return ModelledApplication("m", model.throughput, noise, model.limits, 3, 40.0, imbalance=imbalance)


def uneven() -> FakeApplication:
    """Two nodes are quicker than one, and two GPUs spend less GPU time on a sample than one."""

    @dataclass(frozen=True)
    class Odd(FakeApplication):
        def step_and_sync_seconds(self, counts, local_batch):
            step, sync = super().step_and_sync_seconds(counts, local_batch)
            return step / (1.0, 1.0, 2.5, 3.5, 9.0)[min(sum(counts), 4)] / len(counts), sync / len(counts) / 9.0

    return Odd("odd", BatchLimits(8, 64, 1, 16), (50.0,), seconds_per_sample=0.05, sync_seconds=0.2)


def rates_of(application, counts, local_batch, repeats):
    """Progress per second in each epoch of one configuration; none where it cannot run."""
    total = sum(counts) * local_batch * repeats
    if total > application.limits.maximum:
        return None
    try:
        step, sync = application.step_and_sync_seconds(counts, local_batch)
    except InvalidInput:
        return None
    seconds = step + (repeats - 1) * (step - sync)
    epochs = range(len(application.progress))
    initial = application.limits.initial
    noise = (Efficiency(initial, *application.gradient_statistics(total, epoch)) for epoch in epochs)
    return np.array([each.gain(total / initial) / seconds for each in noise])


def never_faster(application, most_nodes, tries, seed):
    draws = random.Random(seed)
    limits = application.limits
    per_second, per_gpu_second = best_rates(application, most_nodes, 4, [(1, limits.initial)])
    seen = 0
    known = [p for p in getattr(application, "placements", ()) if len(p) <= most_nodes and max(p) <= 4]
    for _ in range(tries):
        nodes = draws.randint(1, min(most_nodes, application.max_nodes))
        counts = tuple(draws.randint(1, 4) for _ in range(nodes))
        counts = draws.choice(known) if known and draws.random() < 0.5 else counts
        repeats = draws.choice((1, 1, 1, 2, 3, 5)) if limits.accumulation else 1
        measured = getattr(application, "local_batches", (limits.local_max,))
        local = draws.choice((draws.randint(1, limits.local_max), draws.choice(measured), limits.local_max))
        found = rates_of(application, counts, min(local, limits.local_max), repeats)
        if found is not None and sum(counts) <= limits.maximum // limits.local_min:
            seen += 1
            assert (found <= per_second * (1 + 1e-9)).all(), (counts, local, repeats)
            assert (found / sum(counts) <= per_gpu_second * (1 + 1e-9)).all(), (counts, local, repeats)
    assert seen > tries / 10


@pytest.mark.parametrize("make", [uneven, partial(modelled, 0.0), partial(modelled, 0.5)])
@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_no_configuration_on_any_number_of_nodes_is_faster(make, nodes):
    never_faster(make(), nodes, 400, nodes)


@pytest.mark.parametrize("name", ["bert", "cifar10", "deepspeech2", "yolov3"])
def test_no_configuration_of_the_published_profiles_is_faster(name, osdi21_data):
    never_faster(load_profiles(osdi21_data / "profiles")[name], 4, 500, 7)


def test_the_rates_are_not_far_above_the_best_configuration():
    application = modelled(0.2)
    per_second, per_gpu_second = best_rates(application, 2, 4, [(1, 128)])
    placements = [tuple(c for c in each if c) for each in product(range(5), repeat=2)]
    locals_ = range(1, application.limits.local_max + 1, 3)
    repeated = (1, 2, 3, 4, 6)
    found = [
        (each, sum(counts))
        for counts in placements
        for local in locals_
        for repeats in repeated
        if counts and (each := rates_of(application, counts, local, repeats)) is not None
    ]
    assert per_second == pytest.approx(np.max([each for each, _ in found], axis=0), rel=2 * TOLERANCE)
    assert per_gpu_second == pytest.approx(np.max([each / k for each, k in found], axis=0), rel=2 * TOLERANCE)


def test_epochs_that_rounds_round_down_and_rigid_jobs_on_more_gpus_do_not_beat_it():
    from pollux.policies import create

    short = FakeApplication("a", BatchLimits(10, 10, 10, 10), tuple(1.4 * (i + 1) for i in range(10)))
    jobs = workload(*((0.0, "a") for _ in range(4)))
    world = SimulationSettings(1, 4, "rounds", resize_seconds=0.0)
    kept = FakeApplication(
        "a", BatchLimits(10, 40, 10, 10), (300.0,), seconds_per_sample=0.1, fixed=FixedConfiguration(1, 10)
    )
    asked = Workload("asked", tuple(WorkloadJob(f"j{i}", 0.0, "a", 4, 40) for i in range(2)))
    for application, load in ((short, jobs), (kept, asked)):
        outcome = simulate(load, create("fifo"), {"a": application}, world)
        average = sum(job.finished - job.submitted for job in outcome.jobs) / len(outcome.jobs)
        assert completion_bound(load, {"a": application}, world).seconds <= average
