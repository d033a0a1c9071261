"""Many runs give what single runs give, in order, in one process or several."""

import multiprocessing
from dataclasses import replace

import pytest

from pollux import policies
from pollux.core import InvalidInput, UnknownName
from pollux.sim.applications.modelled import ModelledApplication
from pollux.sim.simulation.compare import PolicyChoice, check_runs, choose_policies, compare
from pollux.sim.simulation.simulation import SimulationSettings, simulate
from pollux.sim.workloads.builtin import builtin_applications
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.testing.waiting import PATIENCE_SECONDS

APPLICATIONS = builtin_applications()
SETTINGS = SimulationSettings(num_nodes=2, gpus_per_node=4, seed=1)
BATCH = APPLICATIONS["recsys"].limits.initial


def workload(name, count):
    return Workload(name, tuple(WorkloadJob(f"r{i}", 100.0 * i, "recsys", 2, BATCH) for i in range(count)))


WORKLOADS = [workload("one", 3), workload("two", 2)]
POLICIES = [PolicyChoice("tiresias"), PolicyChoice("fifo")]


def lives(outcomes):
    """Everything but timings."""
    return [(run.workload, run.policy, run.jobs) for run in outcomes]


@pytest.fixture(scope="module")
def inline():
    return compare(WORKLOADS, POLICIES, APPLICATIONS, SETTINGS)


def test_order_is_by_workload_then_policy(inline):
    assert [(run.workload, run.policy) for run in inline] == [
        ("one", "tiresias"), ("one", "fifo"), ("two", "tiresias"), ("two", "fifo"),
    ]  # fmt: skip


def test_runs_are_those_of_the_simulator(inline):
    alone = simulate(WORKLOADS[1], policies.create("fifo"), APPLICATIONS, SETTINGS)
    assert lives([alone]) == lives(inline[3:])


def test_processes_change_nothing(inline):
    seen = []
    outcomes = compare(WORKLOADS, POLICIES, APPLICATIONS, SETTINGS, workers=2, progress=lambda *done: seen.append(done))
    assert lives(outcomes) == lives(inline)
    assert seen[0] == (0, 10)
    assert seen[-1] == (10, 10)
    assert seen == sorted(seen)


def test_progress_counts_jobs_over_all_runs():
    seen = []
    compare(WORKLOADS, POLICIES, APPLICATIONS, SETTINGS, progress=lambda *done: seen.append(done))
    assert seen == [(done, 10) for done in range(11)]


def test_options_go_to_policies_that_take_them():
    options = {"fairness": -2.0, "avoid_interference": False}
    pollux, fifo = choose_policies(["pollux", "fifo"], options)
    assert pollux.options == options
    assert fifo.options == {}


def test_unknown_policy_suggests_the_closest():
    with pytest.raises(UnknownName, match="did you mean 'tiresias'"):
        choose_policies(["tiresia"], {})


@pytest.mark.parametrize(("names", "message"), [([], "no policy"), (["fifo", "fifo"], "'fifo' is given twice")])
def test_useless_choices_are_refused(names, message):
    with pytest.raises(InvalidInput, match=message):
        choose_policies(names, {})


def test_no_workers_are_refused():
    with pytest.raises(InvalidInput, match="workers is 0; give at least 1"):
        compare(WORKLOADS, POLICIES, APPLICATIONS, SETTINGS, workers=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_failure_of_a_run_comes_back_and_ends_the_others(workers):
    impatient = replace(SETTINGS, max_hours=0.01)
    with pytest.raises(InvalidInput, match=r"is not done after 0\.01 simulated hours"):
        compare(WORKLOADS, POLICIES, APPLICATIONS, impatient, workers=workers)
    for child in multiprocessing.active_children():
        child.join(PATIENCE_SECONDS)
    assert multiprocessing.active_children() == []


def test_workloads_are_checked_before_anything_runs():
    wrong = Workload("wrong", (WorkloadJob("a", 0.0, "nothing", 1, 8),))
    seen = []
    with pytest.raises(InvalidInput, match="field 'application': 'nothing'"):
        compare([*WORKLOADS, wrong], POLICIES, APPLICATIONS, SETTINGS, progress=lambda *done: seen.append(done))
    assert seen == []


def test_more_nodes_than_were_measured_are_refused_for_rigid_policies_only():
    recsys = APPLICATIONS["recsys"]
    assert isinstance(recsys, ModelledApplication)
    narrow = {"recsys": replace(recsys, max_nodes=1)}
    wide = Workload("wide", (WorkloadJob("a", 0.0, "recsys", 8, BATCH, source="wide.csv, line 2"),))
    with pytest.raises(InvalidInput, match=r"wide\.csv, line 2, field 'num_replicas': '8': needs 2 nodes"):
        check_runs([wide], choose_policies(["pollux", "fifo"], {}), narrow, SETTINGS)
    check_runs([wide], choose_policies(["pollux"], {}), narrow, SETTINGS)
