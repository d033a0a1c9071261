"""What a run has left behind is found by the folders that it has to do with."""

import os
import subprocess
import sys
from typing import Any

import pytest

from pollux.core.errors import InvalidInput
from pollux.testing.jobs import random_changes
from pollux.testing.jobs.leftovers import await_none, left_in
from pollux.testing.waiting import PATIENCE_SECONDS

WAIT = "import sys; print(flush=True); sys.stdin.read()"


@pytest.mark.parametrize("sign", ["command", "environment", "folder", "file", "forked"])
def test_any_sign_is_enough(tmp_path, sign):
    (tmp_path / "log").touch()
    argv = [sys.executable, "-c", WAIT, *([str(tmp_path / "x")] if sign == "command" else [])]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": "/"}
    if sign == "forked":
        # As a data worker: its parent changed its folder after it was started.
        argv[2] = f"import os; os.chdir({os.path.dirname(tmp_path)!r}); os.chdir({tmp_path.name!r}); {WAIT}"
    if sign == "environment":
        options["env"] = {**os.environ, "POLLUX_HOME": str(tmp_path)}
    if sign == "folder":
        options["cwd"] = tmp_path
    with (tmp_path / "log").open("a") as log:
        if sign == "file":
            options["stderr"] = log
        process = subprocess.Popen(argv, **options)
        assert process.stdout is not None
        process.stdout.readline()
        # This process has the file open, too, and is not counted.
        assert list(left_in(tmp_path)) == [process.pid]
        assert list(await_none(0.0, tmp_path)) == [process.pid]
        assert left_in(tmp_path / "elsewhere") == {}
        process.communicate()
    assert await_none(PATIENCE_SECONDS, tmp_path) == {}


class Backend:
    """Runs nothing, and ends nothing."""

    def running(self):
        return []

    def logs(self, *arguments):
        raise InvalidInput("there are none")

    def __getattr__(self, name):
        return lambda *arguments: None


def test_a_run_that_leaves_a_process_of_its_backend_is_told_so_and_the_process_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(random_changes, "_GONE_SECONDS", 0.1)
    home = tmp_path / "home"
    home.mkdir()
    run = random_changes.EventRun(Backend, tmp_path / "job", 1, home=home)  # type: ignore[arg-type]
    run.close()
    process = subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=home)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(AssertionError, match=f"processes {{{process.pid}: 'python.*'}} were left"):
        run.close()
    process.communicate()
    assert process.returncode == -9
