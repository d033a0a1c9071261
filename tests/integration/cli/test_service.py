"""The command line against a real service on this machine: from `up` to `down`, in the order of a user's day."""

import json
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

RUN = "run: " + json.dumps([sys.executable, "train.py"])
SCRIPT = """
import os, sys, time

print("hello from rank", os.environ["RANK"], flush=True)
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(int(os.environ.get("CODE", "0")))
"""


def pollux(home, *words, code: int | None = 0):
    """Run the command in this process; its result."""
    environment = {"POLLUX_HOME": str(home), "POLLUX_SERVER": None, "POLLUX_TOKEN": None}
    done = CliRunner().invoke(app, [str(word) for word in words], prog_name="pollux", env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert code is None or done.exit_code == code, f"{words}: {done.exit_code}\n{done.stdout}\n{done.stderr}"
    return done


def answer(home, *words, **options):
    return json.loads(pollux(home, *words, "--json", **options).stdout)


def until(condition, seconds=PATIENCE_SECONDS):
    return wait_until("change", condition, seconds, 0.1)


@pytest.fixture(scope="module")
def home():
    """A home with a service on two CPU slots; its path is short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="pollux-") as folder:
        path = Path(folder) / "h"
        started = answer(path, "up", "--slots", 2, "--port", 0, "--detach")
        assert started["url"].startswith("http://127.0.0.1:")
        try:
            yield path
        finally:
            pollux(path, "down", code=None)
            with suppress(FileNotFoundError, ProcessLookupError):  # the usual case: it is gone, and has said so
                os.kill(json.loads((path / "service.json").read_text())["pid"], signal.SIGKILL)


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def state(home, job):
    return answer(home, "show", job)["job"]["state"]


def test_up_says_where_and_what(home):
    status = answer(home, "top")["status"]
    assert status["nodes"][0]["gpus"] == 2
    assert status["nodes"][0]["gpu_type"] == "cpu"
    assert "2 CPU slots (as asked with --slots)" in (home / "service.log").read_text()
    second = pollux(home, "up", "--port", 0, "--detach", code=None)
    assert second.exit_code != 0
    assert second.stderr.startswith("error: ")
    assert second.stderr.count("\n") == 1
    assert any(entry["name"] == "service" and entry["level"] == "ok" for entry in answer(home, "doctor")["findings"])


def test_a_job_from_its_file_to_its_end(home, work):
    (work / "job.yaml").write_text(f"name: first\nrun: {json.dumps([sys.executable, 'train.py', 'go'])}\ngpus: 1..2\n")
    planned = answer(home, "submit", work / "job.yaml", "--dry-run")["planned"][0]
    assert planned["plan"]["starts_now"]
    assert planned["request"]["workdir"] == str(work)
    assert answer(home, "ls", "--all")["jobs"] == []
    assert pollux(home, "submit", work / "job.yaml").stdout.startswith("first: starts now on ")
    until(lambda: state(home, "first") == "running")
    assert "first" in pollux(home, "ls").stdout
    assert "first" in pollux(home, "top", "--once").stdout
    assert pollux(home, "explain", "first").stdout.strip()
    again = pollux(home, "submit", work / "job.yaml", code=2)
    assert "first" in again.stderr
    assert answer(home, "resize", "first", "--gpus", "1..1")["job"]["max_gpus"] == 1
    (work / "go").touch()
    followed = pollux(home, "logs", "-f", "first")
    assert "hello from rank 0" in followed.stdout
    assert state(home, "first") == "succeeded"


def test_pause_resume_and_cancel(home, work):
    command = ("--", sys.executable, "train.py", "never")
    pollux(home, "submit", "--name", "held", *command)
    until(lambda: state(home, "held") == "running")
    assert pollux(home, "pause", "held").stdout == "held: paused\n"
    assert [job["id"] for job in answer(home, "ls", "--state", "paused")["jobs"]] == ["held"]
    pollux(home, "resume", "held")
    until(lambda: state(home, "held") == "running")
    assert "only a paused job" in pollux(home, "resume", "held", code=70).stderr
    assert "held: cancelled" in pollux(home, "cancel", "held").stdout
    assert "held' has ended already: it is cancelled" in pollux(home, "cancel", "held", code=70).stderr
    refused = answer(home, "cancel", "held", code=70)
    assert [(entry["job"], entry["code"]) for entry in refused["failed"]] == [("held", "IllegalTransition")]
    assert answer(home, "resize", "held", "--gpus", 1, code=70)["error"]["code"] == "IllegalTransition"


def test_a_job_that_fails_is_told_with_its_exit_code(home, work):
    (work / "job.yaml").write_text(f"name: bad\n{RUN}\nenv: {{CODE: 3}}\nretries: 0\n")
    done = pollux(home, "submit", "--follow", work / "job.yaml", code=1)
    assert "hello from rank 0" in done.stdout
    assert "bad: failed" in done.stderr
    assert "exit code 3" in done.stderr


def test_history_goes_out_and_in_and_is_replayed(home, work):
    pollux(home, "history", "export", "-o", work / "past.ndjson")
    assert json.loads((work / "past.ndjson").read_text().splitlines()[0])["format"] == "pollux-history"
    runs = answer(home, "whatif", "--nodes", "+1", "--history", work / "past.ndjson", "--workers", 1)["runs"]
    assert [run["nodes"] for run in runs] == [1, 2]
    assert "first" in [job["name"] for job in runs[0]["results"][0]["jobs"]]
    assert "as it was" in pollux(home, "whatif", "--workers", 1).stdout
    assert answer(work / "other", "history", "import", work / "past.ndjson")["facts"] > 0
    copied = pollux(work / "other", "history", "export").stdout
    assert copied.splitlines()[1:] == (work / "past.ndjson").read_text().splitlines()[1:]
    assert "empty folder" in pollux(work / "other", "history", "import", work / "past.ndjson", code=2).stderr


def test_down_keeps_jobs_and_the_next_up_finds_them(home, work):
    pollux(home, "submit", "--name", "kept", "--", sys.executable, "train.py", work / "go")
    until(lambda: state(home, "kept") == "running")
    assert answer(home, "down", "--keep")["stopped"]
    gone = pollux(home, "ls", code=69)
    assert "pollux up" in gone.stderr
    pollux(home, "up", "--slots", 2, "--port", 0, "--detach")
    assert state(home, "kept") == "running"
    assert answer(home, "show", "kept")["job"]["generation"] == 1
    (work / "go").touch()
    until(lambda: state(home, "kept") == "succeeded")
