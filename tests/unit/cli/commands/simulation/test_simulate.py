"""`pollux simulate` on a small world: table, JSON, report; repeatable, and complete or not there."""

import json
import os
import subprocess
import sys

import pytest

from pollux.core import InvalidInput
from pollux.sim.results.metrics import TIMINGS

POLICIES = "castor,pollux,tiresias,optimus-oracle"


def without_timings(text):
    read = json.loads(text)
    for result in read["results"]:
        for field in TIMINGS:
            del result[field]
    return json.dumps(read)


def test_table(simulate):
    result = simulate()
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for phrase in (
        "small",
        "vs castor",
        "1.00×",
        "FTF",
        "make",
        "2 nodes × 2 GPUs",
        "rounds of 60 s",
        "fixed",
    ):
        assert phrase in result.stdout
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ") and line.strip()]
    assert lines[-5:] == [*POLICIES.split(","), "lower"]


@pytest.mark.parametrize("words", [("--json",), ("--json", "-")], ids=" ".join)
def test_json_goes_to_standard_output_alone(simulate, words):
    result = simulate(*words, "--policies", POLICIES)
    read = json.loads(result.stdout)
    assert list(read) == ["version", "config", "results", "bounds_hours"]
    assert [entry["policy"] for entry in read["results"]] == POLICIES.split(",")
    assert {entry["workload"] for entry in read["results"]} == {"small"}
    assert [job["name"] for job in read["results"][0]["jobs"]] == ["first", "second", "third", "fourth"]


def test_json_file_beside_the_table(simulate, tmp_path):
    result = simulate("--output", tmp_path / "deep" / "r.json")
    assert "vs castor" in result.stdout
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]
    assert json.loads((tmp_path / "deep" / "r.json").read_text())["config"]["num_nodes"] == 2


def test_options_reach_the_configuration(simulate):
    words = ("--fairness", -2, "--interference", 0.5, "--no-avoid-interference", "--interval", 30)
    more = ("--resize-seconds", 10, "--max-gpus-per-job", 2, "--seed", 7, "--trigger", "events")
    config = json.loads(simulate(*words, *more, "--json", "--policies", "pollux,fifo").stdout)["config"]
    options = config["policies"][0]["options"]
    assert (options["fairness"], options["avoid_interference"]) == (-2.0, False)
    assert "fairness" not in config["policies"][1]["options"]
    expected: dict[str, object] = {"interference": 0.5, "interval_seconds": 30.0, "resize_seconds": 10.0}
    expected |= {"max_gpus_per_job": 2, "seed": 7, "trigger": "events"}
    assert {key: config[key] for key in expected} == expected


def test_same_seed_same_bytes_for_any_number_of_workers_and_any_hash_seed(profiles, workload):
    texts = []
    for workers, hash_seed in ((1, 1), (2, 2)):
        words = [
            "simulate",
            workload,
            "--profiles",
            profiles,
            "--nodes",
            2,
            "--gpus-per-node",
            2,
            "--json",
        ]
        command = [sys.executable, "-m", "pollux", *map(str, words), "--workers", str(workers)]
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        texts.append(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert without_timings(texts[0]) == without_timings(texts[1])


def test_several_workloads(simulate, workload, tmp_path):
    (tmp_path / "other.csv").write_text(workload.read_text())
    result = simulate(tmp_path / "other.csv", "--policies", "fifo,las", "--output", tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [(entry["workload"], entry["policy"]) for entry in read] == [
        ("small", "fifo"), ("small", "las"), ("other", "fifo"), ("other", "las"),
    ]  # fmt: skip
    assert "mean of 2 workloads" in result.stdout


def test_a_file_after_json_is_told_where_it_goes(simulate, tmp_path):
    result = simulate("--json", tmp_path / "r.json")
    assert result.exit_code == 2
    assert f"give --output {tmp_path / 'r.json'}" in result.stderr
    assert not (tmp_path / "r.json").exists()


def test_output_folder(simulate, tmp_path):
    target = tmp_path / "results"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "report.html").write_text("from before")
    result = simulate("--output", target, "--policies", "fifo")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in target.iterdir()) == [
        "gpus-small.png", "jct-small.png", "job-small.png", "notes.txt", "report.html", "results.json",
    ]  # fmt: skip
    assert "from before" not in (target / "report.html").read_text()
    assert str(target / "report.html") in result.stdout


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted; nothing was written\n"),
        (InvalidInput("half way"), 2, "error: half way\n"),
    ],
    ids=["interrupted", "failed"],
)
@pytest.mark.parametrize("name", ["new", "r.json"])
def test_run_that_ends_early_leaves_nothing(simulate, tmp_path, monkeypatch, error, code, message, name):
    def fail(*arguments):
        raise error

    (tmp_path / "r.json").write_text("from before")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("pollux.sim.compare", fail)
    result = simulate("--output", tmp_path / name)
    assert (result.exit_code, result.stderr, result.stdout) == (code, message, "")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "r.json").read_text() == "from before"


def test_report_that_fails_leaves_nothing(simulate, tmp_path, monkeypatch):
    def fail(*arguments):
        raise InvalidInput("cannot draw")

    monkeypatch.setattr("pollux.sim.results.report.plot_gpus", fail)
    before = sorted(tmp_path.rglob("*"))
    result = simulate("--output", tmp_path / "new", "--policies", "fifo")
    assert (result.exit_code, result.stderr) == (2, "error: cannot draw\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_built_in_workload_without_any_argument(run, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)
    result = run("simulate", "--policies", "fifo")
    assert result.exit_code == 0, result.stderr
    assert "built-in" in result.stdout


def test_published_workload_gives_the_published_averages(run, osdi21_data):
    words = ["--profiles", osdi21_data / "profiles", "--policies", "tiresias,optimus-oracle", "--json"]
    result = run("simulate", osdi21_data / "workloads" / "workload-1.csv", *words, "--workers", 1)
    averages = {entry["policy"]: round(entry["avg_jct_hours"], 4) for entry in json.loads(result.stdout)["results"]}
    assert averages == {"tiresias": 0.6871, "optimus-oracle": 1.1353}
