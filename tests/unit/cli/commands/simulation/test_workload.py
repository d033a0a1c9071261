"""`pollux workload generate`: CSV that `simulate` takes, repeatable."""

import json

from pollux.sim.workloads.workload import read_workload

SMALL = ("workload", "generate", "--jobs", 6, "--hours", 1)


def test_csv_on_standard_output(run, tmp_path):
    result = run(*SMALL)
    assert result.exit_code == 0, result.stderr
    (tmp_path / "made.csv").write_text(result.stdout)
    assert len(read_workload(tmp_path / "made.csv").jobs) == 6


def test_file_can_be_simulated(run, tmp_path):
    assert run(*SMALL, "--output", tmp_path / "made.csv").stdout == ""
    result = run("simulate", tmp_path / "made.csv", "--policies", "las", "--workers", 1)
    assert result.exit_code == 0, result.stderr
    assert "made" in result.stdout


def test_same_seed_same_file(run):
    assert run(*SMALL, "--seed", 3).stdout == run(*SMALL, "--seed", 3).stdout
    assert run(*SMALL, "--seed", 3).stdout != run(*SMALL, "--seed", 4).stdout


def test_load_multiplies_jobs(run):
    assert len(run(*SMALL, "--load", 2.0).stdout.splitlines()) == 13


def test_json_has_jobs_and_settings(run, tmp_path):
    read = json.loads(run(*SMALL, "--realistic", "--json").stdout)
    assert read["config"]["realistic"] is True
    assert list(read["jobs"][0]) == ["name", "time", "application", "num_gpus", "batch_size"]
    run(*SMALL, "--json", "--output", tmp_path / "made.json")
    assert json.loads((tmp_path / "made.json").read_text())["name"] == "made"


def test_profiles_of_ones_own(run, profiles):
    result = run(*SMALL, "--profiles", profiles, "--nodes", 2, "--gpus-per-node", 2)
    assert result.exit_code == 0, result.stderr
    assert {line.split(",")[2] for line in result.stdout.splitlines()[1:]} == {"tiny"}


def test_trace(run, osdi21_data):
    words = ("--profiles", osdi21_data / "profiles", "--trace", osdi21_data / "philly.csv")
    result = run(*SMALL, *words)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 7
