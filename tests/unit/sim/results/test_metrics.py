"""The numbers of a result, by hand; and what the configuration says."""

import json

import pytest

import pollux
from pollux import policies
from pollux.sim.results.bound import completion_bound
from pollux.sim.results.metrics import TIMINGS, bounds, configuration, describe_world, document, measure, to_json
from pollux.sim.simulation.compare import choose_policies
from pollux.sim.simulation.simulation import JobOutcome, RunOutcome, SimulationSettings
from pollux.sim.workloads.builtin import builtin_applications, builtin_workload

SETTINGS = SimulationSettings(num_nodes=2, gpus_per_node=4)
HOUR = 3600.0


def outcome(*jobs, decisions=(0.001, 0.003)):
    return RunOutcome("some", "fifo", tuple(jobs), decisions, cpu_seconds=1.5)


def job(name, submitted, finished, restarts=0, gpu_hours=0.0):
    return JobOutcome(name, "recsys", submitted, submitted + 10, finished, restarts, gpu_hours * HOUR)


@pytest.fixture
def result():
    # Completion times of 1, 2, 3 and 6 hours; from half an hour on until the seventh.
    jobs = [
        job("a", 0.5 * HOUR, 1.5 * HOUR, restarts=1, gpu_hours=2.0),
        job("b", 0.5 * HOUR, 2.5 * HOUR, gpu_hours=4.0),
        job("c", 1.0 * HOUR, 4.0 * HOUR, restarts=5, gpu_hours=6.0),
        job("d", 1.0 * HOUR, 7.0 * HOUR, gpu_hours=14.0),
    ]
    return measure(outcome(*jobs), builtin_applications(), SETTINGS)


def test_completion_times(result):
    assert result["avg_jct_hours"] == pytest.approx(3.0)
    assert result["p50_jct_hours"] == pytest.approx(2.5)
    assert result["p99_jct_hours"] == pytest.approx(3.0 + 3.0 * 0.97)


def test_makespan_runs_from_the_first_submission(result):
    assert result["makespan_hours"] == pytest.approx(6.5)


def test_restarts_and_gpu_time(result):
    assert result["restarts_per_job"] == pytest.approx(1.5)
    assert result["gpu_hours"] == pytest.approx(26.0)
    assert result["utilization"] == pytest.approx(26.0 / (8 * 6.5))


def test_decision_times_are_in_milliseconds(result):
    assert result["decision_ms_mean"] == pytest.approx(2.0)
    assert result["decision_ms_max"] == pytest.approx(3.0)
    assert result["cpu_seconds"] == 1.5


def test_fairness_summary_is_that_of_the_jobs(result):
    rhos = [entry["ftf"] for entry in result["jobs"]]
    assert result["worst_ftf"] == max(rhos)
    assert result["unfair_fraction"] == sum(rho > 1 for rho in rhos) / 4


def test_jobs_are_told_apart_by_the_gpu_time_of_a_whole_training():
    jobs = [
        JobOutcome("a", "resnet-small", 0.0, 1.0, HOUR, 0, HOUR),
        JobOutcome("b", "recsys", 0.0, 1.0, 2 * HOUR, 0, HOUR),
        JobOutcome("c", "vit-large", 0.0, 1.0, 8 * HOUR, 0, HOUR),
        JobOutcome("d", "vit-large", 0.0, 1.0, 10 * HOUR, 0, HOUR),
    ]
    result = measure(outcome(*jobs), builtin_applications(), SETTINGS)
    classes = result["classes"]
    assert sum(entry["jobs"] for entry in classes.values()) == 4
    assert classes["huge"]["jobs"] == 2
    assert classes["huge"]["avg_jct_hours"] == pytest.approx(9.0)
    assert classes["huge"]["worst_ftf"] == max(entry["ftf"] for entry in result["jobs"][2:])
    assert "small" in classes


def test_the_bound_of_each_workload_is_in_the_document():
    workload, settings = builtin_workload(), SimulationSettings()
    found = bounds([workload], builtin_applications(), settings)
    seconds = completion_bound(workload, builtin_applications(), settings).seconds
    assert found == {"built-in": pytest.approx(seconds / HOUR)}
    assert document({}, [], found)["bounds_hours"] == found
    assert "bounds_hours" not in document({}, [])


def test_every_field_is_there_in_order(result):
    assert list(result) == [
        "workload", "policy", "avg_jct_hours", "p50_jct_hours", "p99_jct_hours", "makespan_hours",
        "restarts_per_job", "gpu_hours", "utilization", "worst_ftf", "unfair_fraction",
        "classes", "decision_ms_mean", "decision_ms_max", "cpu_seconds", "jobs",
    ]  # fmt: skip
    assert set(TIMINGS) < set(result)
    assert list(result["jobs"][0]) == [
        "name", "application", "submitted", "started", "finished", "restarts", "gpu_seconds", "ftf",
    ]  # fmt: skip
    assert [entry["name"] for entry in result["jobs"]] == ["a", "b", "c", "d"]


def test_single_job():
    result = measure(outcome(job("a", 0, HOUR)), builtin_applications(), SETTINGS)
    assert result["avg_jct_hours"] == result["p50_jct_hours"] == result["p99_jct_hours"] == 1.0


@pytest.fixture
def config():
    chosen = choose_policies(["pollux", "fifo"], {"fairness": -2.0, "avoid_interference": False})
    return configuration([builtin_workload()], chosen, builtin_applications(), SETTINGS)


def test_configuration_has_all_that_results_depend_on(config):
    assert config["num_nodes"] == 2
    assert [policy["name"] for policy in config["policies"]] == ["pollux", "fifo"]
    given = {"fairness": -2.0, "avoid_interference": False}
    assert config["policies"][0]["options"].items() >= given.items()
    for policy in config["policies"]:
        assert set(policy["options"]) == policies.options(policy["name"]), "defaults count too"
    assert set(config["applications"]) == set(builtin_applications())
    assert all("fixed" in entry for entry in config["applications"].values())
    assert "workers" not in config


def test_document_is_json_with_the_version(config, result):
    text = to_json(document(config, [result]))
    read = json.loads(text)
    assert list(read) == ["version", "config", "results"]
    assert read["version"] == pollux.__version__
    assert text.endswith("}\n")


def test_world_says_what_was_fixed(config):
    config["applications"]["recsys"]["fixed"] = {"num_gpus": 1, "batch_size": 64}
    text = "\n".join(describe_world(config))
    for phrase in (
        "2 nodes × 4 GPUs",
        "rounds of 60 s",
        "30 s",
        "double",
        "recsys (1 GPU, batch 64)",
        "seed 0",
        "fairness -2",
    ):
        assert phrase in text
    assert "lose" not in text
    config["interference"], config["trigger"] = 0.5, "events"
    text = "\n".join(describe_world(config))
    assert "lose 50% of their speed" in text
    assert "decisions by events" in text
