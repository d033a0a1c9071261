"""A home folder that cannot be used, and a service that fails in the background: one line, the right exit code."""

import os
import sys

import pytest

import pollux.cli.commands.service.up
from pollux.core.errors import Conflict


@pytest.mark.parametrize("below", ["home", "file/home"])
@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_up_says_that_the_home_cannot_be_used(run, tmp_path, below, more):
    (tmp_path / below.split("/")[0]).write_text("")
    result = run("up", "--home", tmp_path / below, "--slots", 1, "--port", 0, *more)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"home {tmp_path / below} cannot be used" in result.stderr
    assert "POLLUX_HOME" in result.stderr


def test_up_detached_says_that_its_log_cannot_be_written(run, tmp_path):
    (tmp_path / "service.log").mkdir()
    result = run("up", "--home", tmp_path, "--slots", 1, "--port", 0, "--detach")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "service.log" in result.stderr


@pytest.mark.parametrize("below", ["home", "file/home"])
def test_a_history_is_not_brought_into_such_a_home(run, tmp_path, monkeypatch, below):
    (tmp_path / below.split("/")[0]).write_text("")
    (tmp_path / "history.ndjson").write_text("")
    monkeypatch.setenv("POLLUX_HOME", str(tmp_path / below))
    result = run("history", "import", tmp_path / "history.ndjson")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "cannot be used" in result.stderr


@pytest.mark.parametrize(("code", "seen"), [(2, 2), (1, 1), (7, 7)])
def test_a_detached_failure_has_the_exit_code_of_the_foreground(run, tmp_path, monkeypatch, code, seen):
    def spawn(words, output):
        said = f"import sys; print('error: it cannot be', file=sys.stderr); sys.exit({code})"
        actions = [(os.POSIX_SPAWN_DUP2, output, 2)]
        return os.posix_spawn(sys.executable, [sys.executable, "-c", said], os.environ, file_actions=actions)

    monkeypatch.setattr(pollux.cli.commands.service.up, "_spawn", spawn)
    result = run("up", "--home", tmp_path / "home", "--slots", 1, "--port", 0, "--detach")
    assert result.exit_code == seen
    assert result.stderr == "error: it cannot be\n"


@pytest.mark.parametrize("file", ["service.json", "store.sqlite"])
def test_a_single_job_is_not_run_in_the_folder_of_a_service(run, tmp_path, file):
    (tmp_path / file).touch()
    (tmp_path / "train.py").touch()
    result = run("run", "--home", tmp_path, "--slots", 1, tmp_path / "train.py")
    assert result.exit_code == Conflict.exit_code
    assert result.stderr.count("\n") == 1
    assert f"--home is '{tmp_path}', the folder of a service" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file, "train.py"])


@pytest.mark.parametrize("below", ["home", "file/home"])
def test_a_single_job_is_not_run_in_such_a_home(run, tmp_path, below):
    (tmp_path / below.split("/")[0]).write_text("")
    (tmp_path / "train.py").touch()
    result = run("run", "--home", tmp_path / below, "--slots", 1, tmp_path / "train.py")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert f"home {tmp_path / below} cannot be used" in result.stderr
    assert "--home" in result.stderr
