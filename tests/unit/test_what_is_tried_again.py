"""The hooks in tests/conftest.py: what is tried once more, here and in CI, and what is told of it; seeds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
# The plugins that matter here; others take seconds to load.
PLUGINS = ("-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_rerunfailures")
SAMPLE = """
import subprocess

import pytest

from pollux.testing.waiting import OutOfTime, wait_until

SEED, EVENTS = 71, 3
seen = set()


def first(name):
    return name not in seen and not seen.add(name)


def test_waits():
    if first("waits"):
        wait_until("end", lambda: None, 0.0)


def test_waits_for_a_process():
    if first("process"):
        raise subprocess.TimeoutExpired("sleep", 1)


def test_finds_wrong_data():
    assert not first("data")


def test_only_speaks_of_waiting():
    if first("text"):
        raise AssertionError("OutOfTime: no end after 3 s")


def test_finds_wrong_data_when_a_wait_is_over():
    if first("after"):
        try:
            raise OutOfTime("no end")
        finally:
            raise AssertionError("two samples were lost")


@pytest.fixture
def checked():
    yield
    assert not first("checked")


def test_waits_and_leaves_something_wrong(checked):
    if first("leaves"):
        raise OutOfTime("no end")


@pytest.fixture
def ended():
    yield
    if first("ended"):
        raise OutOfTime("no end of it")


def test_finds_wrong_data_and_does_not_end(ended):
    assert not first("and"), "one sample came twice"


def test_does_not_end(ended):
    seen.discard("ended" if first("end") else "")
"""


def run(folder: Path, *options: str, room: str = "faults", ci: str = "", status: int = 1) -> str:
    (folder / "tests" / room).mkdir(parents=True)
    shutil.copy(CONFTEST, folder / "tests" / "conftest.py")
    (folder / "tests" / room / "test_sample.py").write_text(SAMPLE)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "POLLUX_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, "-raR", *options, "tests"],
        cwd=folder,
        env=environment | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(CONFTEST.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def named(told: str, what: str) -> set[str]:
    return set(re.findall(rf"^{what} \S+::test_(\w+)", told, re.MULTILINE))


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_only_waiting_in_vain_is_tried_once_more(tmp_path, options):
    told = run(tmp_path, *options)
    wrong = {
        "finds_wrong_data",
        "only_speaks_of_waiting",
        "finds_wrong_data_when_a_wait_is_over",
        "waits_and_leaves_something_wrong",
        "finds_wrong_data_and_does_not_end",
    }
    assert named(told, "RERUN") == {"waits", "waits_for_a_process", "does_not_end"}
    assert named(told, "FAILED") == wrong
    assert "two samples were lost" in told
    assert "one sample came twice" in told
    # Seeds are told of those that pass too, and once more where a test fails.
    assert re.search(r"= seeds =+\n", told)
    assert "faults/test_sample.py::test_waits: seed 71, 3 events\n" in told
    assert told.count("seed 71, 3 events; --seed and --events give the same moments again") >= len(wrong)


def test_ci_tries_everything_once_more_and_tells_what_went_wrong(tmp_path):
    told = run(tmp_path, room="unit", ci="true", status=0)
    assert {"waits", "finds_wrong_data", "waits_and_leaves_something_wrong"} <= named(told, "RERUN")
    assert "tried again: each is a race, to be repaired" in told
    assert re.search(r"test_finds_wrong_data \(call\): .*assert not", told)


def test_ci_does_not_try_wrong_data_of_faults_again(tmp_path):
    told = run(tmp_path, ci="true")
    assert named(told, "RERUN") == {"waits", "waits_for_a_process", "does_not_end"}
    assert "finds_wrong_data" in named(told, "FAILED")


def test_the_long_set_tries_nothing_twice(tmp_path):
    recipe = (CONFTEST.parents[1] / "Makefile").read_text().split("\ntest-faults:")[1].split("\n\n")[0]
    assert "--force-reruns 0" in recipe
    assert " -s " not in recipe, "workers have nowhere to print to"
    told = run(tmp_path, "--force-reruns", "0", "--seed", "5")
    assert named(told, "RERUN") == set()
    assert {"waits", "waits_for_a_process"} <= named(told, "FAILED")
    assert "seed of faults: 5" in told
