"""The benchmark scripts as people call them: flags, the JSON on the last line, and bad instances."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
PARAMETERS = [0.1, 0.01, 0.05, 0.002, 0.02, 0.001, 1.5]


def call(script: str, *arguments: str):
    command = [sys.executable, str(FOLDER / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def entry(**fields):
    batch = {"initial": 64, "maximum": 4096, "local_min": 8, "local_max": 128}
    return {"parameters": PARAMETERS, "noise_scale": 900.0, "batch": batch, "max_gpus": 16, "age": 4000, **fields}


def instance(tmp_path: Path, **fields) -> Path:
    path = tmp_path / "instance.json"
    jobs = [entry(id="runs", placement={"node-0": 2}), entry(id="waits", age=0), entry(id="other", restarts=2)]
    path.write_text(json.dumps({"nodes": [4, 4, 4], "jobs": jobs, **fields}))
    return path


def test_an_instance_gives_allocation_quality_and_time(tmp_path):
    done = call("allocate", "--instance", str(instance(tmp_path)))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["allocation"]) == {"runs", "waits", "other"}
    assert all(sum(shares.values()) >= 1 for shares in result["allocation"].values())
    assert 0.9 < result["quality"] <= 1.0 + 1e-9
    assert result["fitness"] == pytest.approx(result["quality"] * result["bound"])
    assert result["idle_usable_gpus"] == 0
    assert result["decision_ms"] > 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nodes": []}, "field 'nodes'"),
        ({"nodes": [-1]}, "nodes[0].gpus is -1"),
        ({"jobs": [entry(noise_scale=-1)]}, "jobs[0].noise_scale is -1"),
        ({"jobs": [entry(parameters=[1, 2])]}, "jobs[0].parameters is [1, 2]"),
        ({"jobs": [entry(parameters=["x"] * 7)]}, "jobs[0].parameters"),
        ({"jobs": [entry(age="old")]}, "jobs[0].age is 'old'"),
        ({"jobs": [entry(placement={"nowhere": 1})]}, "node 'nowhere'"),
        ({"jobs": [entry(placement={"node-0": 9})]}, "current placements are illegal"),
        ({"jobs": [entry(batch=None)]}, "jobs[0].batch is None"),
        ({"jobs": [3]}, "jobs[0] is 3"),
        ({"fairness": "fair"}, "fairness"),
    ],
)
def test_a_bad_instance_is_one_clear_line(tmp_path, fields, said):
    done = call("allocate", "--instance", str(instance(tmp_path, **fields)))
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_an_instance_that_is_not_there(tmp_path):
    done = call("allocate", "--instance", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert "none.json" in done.stderr


@pytest.mark.parametrize("script", ["allocate", "fit", "local", "reproduce", "run_all", "simulate", "strangers"])
def test_every_script_has_quick_and_seed(script):
    done = call(script, "--help")
    assert done.returncode == 0
    assert "--quick" in done.stdout
    assert "--seed" in done.stdout


def test_the_quick_simulation_ends_with_one_json_object(osdi21_data):
    done = call("simulate", "--quick")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["jobs"] == 160
    assert result["cpu_seconds"] > 0
    assert result["hardware"]
