"""The hook in tests/conftest.py that turns skips into failures when CI=true."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
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


def run(folder: Path, source: str, ci: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_sample.py").write_text(source)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *options],
        cwd=folder,
        env=environment | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
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


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_what_is_missing_is_told_once_for_all_tests_that_need_it(tmp_path, options):
    result = run(tmp_path, SKIPPED_FIXTURE, "", "-rs", "--rootdir", str(tmp_path), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    (told,) = [line for line in result.stdout.splitlines() if "no engine here" in line]
    assert told == "SKIPPED [2] test_sample.py:6: no engine here: install one"
