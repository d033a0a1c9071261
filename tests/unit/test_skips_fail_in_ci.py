"""The hooks in tests/conftest.py: skips that fail when CI=true, tests without their data, the record of a run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
# The copy of the conftest imports `tests.support` as the original does.
REPOSITORY = str(CONFTEST.parent.parent)
# The plugins that matter here; others take seconds to load.
PLUGINS = ("-p", "no:cacheprovider", "-p", "xdist", "-p", "pytest_rerunfailures")
SKIPPED_TEST = "import pytest\ndef test_one(): pass\ndef test_two(): pytest.skip('no such thing here')\n"
SKIPPED_MODULE = "import pytest\npytest.skip('no such module', allow_module_level=True)\n"
SKIPPED_FIXTURE = """
import pytest

@pytest.fixture(scope="module")
def engine():
    pytest.skip("no engine here: install one")

def test_one(engine): pass
def test_two(engine): pass
def test_three(): pass
"""
PASSING = "def test_one(): pass\n"
WITH_DATA = "def test_one(): pass\ndef test_two(osdi21_data): pass\ndef test_three(osdi21_data): pass\n"
FAILING = "import pytest\ndef test_one(): pass\ndef test_two(): assert False\n"


def run(folder: Path, source: str, ci: str, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_sample.py").write_text(source)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *options],
        cwd=folder,
        env=environment | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": REPOSITORY} | more,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
@pytest.mark.parametrize(
    ("source", "named"),
    [
        (SKIPPED_TEST, "test_sample.py::test_two: Skipped: no such thing here"),
        (SKIPPED_MODULE, "no such module"),
    ],
    ids=["test", "module"],
)
def test_a_skip_fails_the_run_and_is_named(tmp_path, source, named, options):
    result = run(tmp_path, source, "true", *options)
    assert result.returncode == 1, result.stdout + result.stderr
    assert named in result.stdout


@pytest.mark.parametrize(("source", "ci"), [(SKIPPED_TEST, ""), (PASSING, "true")], ids=["not in CI", "no skip"])
def test_other_runs_pass(tmp_path, source, ci):
    result = run(tmp_path, source, ci)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "which CI=true counts" not in result.stdout


PROCESSES = pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])


@PROCESSES
def test_what_lacks_the_published_data_is_left_out_and_told_once(tmp_path, options):
    absent = str(tmp_path / "nowhere")
    result = run(tmp_path, WITH_DATA, "", *options, POLLUX_OSDI21_DATA=absent)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    assert "skipped" not in result.stdout
    assert result.stdout.count(absent) == 1
    assert f"2 tests of published results: their data is not at {absent}; set POLLUX_OSDI21_DATA" in result.stdout


def test_in_ci_the_lacking_data_fails_the_run_and_is_told_once(tmp_path):
    result = run(tmp_path, WITH_DATA, "true", "-q", "-r", "f", POLLUX_OSDI21_DATA=str(tmp_path / "nowhere"))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "test_sample.py::test_two and 1 more: Skipped: the published OSDI'21 data is not at" in result.stdout


def test_with_the_data_nothing_is_left_out(tmp_path):
    result = run(tmp_path, WITH_DATA, "", POLLUX_OSDI21_DATA=str(tmp_path))
    assert "3 passed" in result.stdout
    assert "left out" not in result.stdout


@PROCESSES
def test_a_run_appends_its_counts_to_the_record(tmp_path, options):
    record = tmp_path / "record"
    for _ in range(2):
        run(tmp_path, FAILING, "", *options, POLLUX_TEST_RECORD=str(record))
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(line["exit"], line["passed"], line["failed"], line["rerun"]) for line in lines] == 2 * [
        (1, 1, ["test_sample.py::test_two"], [])
    ]


@PROCESSES
def test_what_is_missing_is_told_once_for_all_tests_that_need_it(tmp_path, options):
    result = run(tmp_path, SKIPPED_FIXTURE, "", "-rs", "--rootdir", str(tmp_path), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    (told,) = [line for line in result.stdout.splitlines() if "no engine here" in line]
    assert told == "SKIPPED [2] test_sample.py:6: no engine here: install one"
