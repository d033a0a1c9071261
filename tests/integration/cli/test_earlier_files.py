"""Checkpoints, stores and histories of the code before the rooms had packages: they load, and go on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS

EARLIER = Path(__file__).parents[2] / "fixtures" / "before_packages"


def command(home: Path, *words: object) -> str:
    environ = {**os.environ, "POLLUX_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "pollux", *map(str, words)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def states_after_up(home: Path) -> dict[str, str]:
    command(home, "up", "--detach", "--slots", 2, "--port", 0)
    try:
        jobs = json.loads(command(home, "ls", "--all", "--json"))["jobs"]
    finally:
        command(home, "down")
    return {job["id"]: job["state"] for job in jobs}


def test_a_checkpoint_is_resumed_where_it_ended(tmp_path):
    shutil.copytree(EARLIER / "checkpoints", tmp_path / "checkpoints")
    words = [sys.executable, str(EARLIER / "resumes.py"), str(tmp_path / "checkpoints"), "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("pass ")] == ["pass 3", "pass 4"]


@pytest.mark.parametrize("way", ["store", "history"])
def test_a_service_goes_on_with_the_jobs_it_knew(tmp_path, way):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    if way == "store":
        shutil.copy(EARLIER / "store.sqlite", home)
    else:
        command(home, "history", "import", EARLIER / "history.ndjson")
    assert states_after_up(home) == {"first": "succeeded", "second": "succeeded"}
