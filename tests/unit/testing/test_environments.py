"""The tool that runs tests in other people's surroundings: what it changes reaches them, and what fails is told."""

import os
import subprocess
import sys
from pathlib import Path

from pollux.testing.waiting import PATIENCE_SECONDS

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "test_environments.py"
DEPENDENT = """
import os, signal

def test_width():
    assert os.environ.get("COLUMNS") != "20"

def test_signals():
    assert signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_what_depends_on_its_surroundings_is_found(tmp_path):
    (tmp_path / "test_dependent.py").write_text(DEPENDENT)
    names = ["umask-077", "narrow", "background", "blocked"]
    command = [sys.executable, str(TOOL), *names, "--tests", str(tmp_path / "test_dependent.py")]
    # The plugins that matter here; others take seconds to load.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin,pytest_rerunfailures"}
    done = subprocess.run(
        command, env=os.environ | plugins, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 1, done.stderr
    told = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0] in names}
    assert "ok     2 passed" in told["umask-077"]
    for name in names[1:]:
        assert "FAILED 1 failed, 1 passed" in told[name]


def test_as_many_are_promised_as_there_are():
    told = subprocess.run([sys.executable, str(TOOL), "--list"], capture_output=True, text=True, check=True).stdout
    assert f"in {len(told.split())} surroundings" in (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
