"""docs/tutorial-policy.md: its policy is short, its code runs, and its policy passes the suite it tells to inherit.

docs/tutorial-training.md: five lines are marked, its code runs as printed, and a job stops and goes on as it says.
"""

import json
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from pollux.testing.conformance import policies
from pollux.testing.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial-policy.md").read_text()
TRAINING = (ROOT / "docs" / "tutorial-training.md").read_text()
POLICY, CONFORMANCE, SIMULATION = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PRINTED = re.search(r"^```\n(shortest .*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MODULE = "pollux.policies.rigid.shortest"


def run(source: str, name: str) -> ModuleType:
    """A module made of a block of the page."""
    module = ModuleType(name)
    exec(compile(source, "docs/tutorial-policy.md", "exec"), module.__dict__)
    return module


def run_beside_the_policy(source: str) -> ModuleType:
    """The same while the policy can be imported by the name that the page gives it."""
    assert MODULE not in sys.modules, "the tutorial's policy exists; choose another name for it"
    sys.modules[MODULE] = POLICY_MODULE
    try:
        return run(source, "tutorial")
    finally:
        del sys.modules[MODULE]


POLICY_MODULE = run(POLICY, MODULE)


class TestTutorialPolicy(run_beside_the_policy(CONFORMANCE).TestShortest):  # type: ignore[misc]
    """The class printed on the page, with all that it inherits."""


def test_the_class_on_the_page_inherits_the_suite():
    assert issubclass(TestTutorialPolicy, policies.PolicyConformance)


def test_the_policy_has_fewer_than_40_lines():
    assert len(POLICY.splitlines()) < 40


def test_the_registry_line_names_the_class():
    line = re.search(r'^    "(.*)": "(.*):(.*)",$', PAGE, re.MULTILINE)
    assert line is not None
    name, module, attribute = line.groups()
    assert module == MODULE
    assert getattr(POLICY_MODULE, attribute).name == name


@pytest.mark.slow
def test_the_simulation_prints_what_the_page_says(capsys):
    run_beside_the_policy(SIMULATION)
    assert PRINTED is not None
    assert capsys.readouterr().out == PRINTED.group(1)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def training_page(folder: str) -> None:
    """Run in a replica: the code of the page from top to bottom, as one script."""
    os.chdir(folder)
    exec(compile("\n".join(python_blocks(TRAINING)), "docs/tutorial-training.md", "exec"), {"__name__": "tutorial"})


def digits(options: list[str]) -> None:
    """Run in a replica: the example that the page starts."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [str(ROOT / "examples" / "digits" / "train.py"), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_five_lines_of_the_training_tutorial_are_marked():
    marked = re.findall(r"^.*?# (\d)$", "\n".join(python_blocks(TRAINING)), re.MULTILINE)
    assert marked == ["1", "2", "3", "4", "5"]


def test_the_training_tutorial_runs_as_printed(replica_server, tmp_path):
    arguments = {"folder": str(tmp_path)}
    (result,) = replica_server.start(f"{Path(__file__).resolve()}:training_page", 1, arguments).wait(PATIENCE_SECONDS)
    assert result.exit_code == 0, result.output
    said = re.search(r"^```\n(largest difference .*?)^```$", TRAINING, re.DOTALL | re.MULTILINE)
    assert said is not None
    assert said.group(1) in result.output
    receipt = json.loads((tmp_path / "results" / "receipt.json").read_text())
    assert (tmp_path / "results" / "receipt.png").exists()
    assert (receipt["job"], receipt["mode"], receipt["initial_batch"], receipt["max_batch"]) == (
        *("digits", "adaptive"),
        *(64, 1024),
    )
    assert receipt["metrics"]["accuracy"]["value"][-1] > 0.8
    assert receipt["progress"]["predicted"] == pytest.approx(8 * 27_000, rel=0.01)


def test_a_job_stops_and_goes_on_at_another_size(replica_server, tmp_path):
    environment = {"POLLUX_CHECKPOINT_DIR": str(tmp_path / "saved"), "POLLUX_OUTPUT_DIR": str(tmp_path / "results")}
    function = f"{Path(__file__).resolve()}:digits"
    running = replica_server.start(function, 2, {"options": ["--epochs", "50"]}, environment)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "epoch 1" not in (running.folder / "output-0.txt").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.signal(signal.SIGTERM, replica=1)
    assert [result.exit_code for result in running.wait(PATIENCE_SECONDS)] == [143, 143]
    receipt = json.loads((tmp_path / "results" / "receipt.json").read_text())
    done = int(receipt["totals"]["samples"] // 27_000)
    assert 1 <= done < 50
    (result,) = replica_server.start(function, 1, {"options": ["--epochs", str(done + 1)]}, environment).wait(
        PATIENCE_SECONDS
    )
    assert result.exit_code == 0, result.output
    assert re.findall(r"^epoch (\d+): accuracy", result.output, re.MULTILINE) == [str(done + 1)]
    receipt = json.loads((tmp_path / "results" / "receipt.json").read_text())
    assert {"stopped", "resized", "resumed", "finished"} <= {event["kind"] for event in receipt["events"]}
    assert [(entry["pass"], entry["samples"]) for entry in receipt["ledger"]] == [(n, 27_000) for n in range(done + 1)]
    assert len({entry["hash"] for entry in receipt["ledger"]}) == 1
