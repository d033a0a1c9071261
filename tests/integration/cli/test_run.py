"""`pollux run` for real: output, exit codes, what is left behind, Ctrl-C, and reports that reach the engine."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.support.surroundings import hearing

from pollux.testing.waiting import PATIENCE_SECONDS

REPORTING = """
import json, os, sys, time, urllib.request
def tell(body, path=f"/v1/jobs/{os.environ['POLLUX_JOB']}/reports"):
    request = urllib.request.Request(
        os.environ["POLLUX_URL"] + path, json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["POLLUX_JOB_TOKEN"], "Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]
report = {"generation": int(os.environ["POLLUX_GENERATION"]), "step": 5, "samples": 320, "progress": 320.0,
          "epoch": 0.5, "num_replicas": 1, "num_nodes": 1, "batch_size": 64, "local_batch": 64, "accumulation": 1,
          "loss": 0.125, "total_progress": 640.0}
print(tell(report))
print(tell({**report, "stepp": 1}))
print(tell(report, "/v1/jobs/other/reports"))
print(tell(report, "/v1/status"))
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "hello.py").write_text("import sys; print('hello', *sys.argv[1:]); sys.exit(int(sys.argv[-1]))")
    (tmp_path / "report.py").write_text(REPORTING)
    (tmp_path / "wait.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('waiting', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    (tmp_path / "save.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "folder = pathlib.Path(os.environ['POLLUX_CHECKPOINT_DIR'])\n"
        "def save(*_):\n"
        "    time.sleep(0.2)\n"
        "    folder.mkdir(parents=True, exist_ok=True)\n"
        "    (folder / 'state').write_text('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('resumed' if (folder / 'state').exists() else 'new', os.getpid(), flush=True)\n"
        "while not (folder / 'state').exists(): time.sleep(0.05)\n"
    )
    return tmp_path


def start(work, *words, hears=True):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(work / "t")}
    (work / "t").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pollux", "run", "--slots", "2", *words]
    pipe = subprocess.PIPE
    with hearing(signal.SIGINT, signal.SIGHUP) if hears else nullcontext():
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=work, env=environment)


def finished(process):
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert "Traceback" not in stderr
    return process.returncode, stdout, stderr


def test_output_is_the_jobs_own_and_nothing_is_left(work):
    code, stdout, stderr = finished(start(work, "hello.py", "--gpus", "9", "0"))
    assert (code, stdout) == (0, "hello --gpus 9 0\n")
    # Which states are seen on the way depends on when one looks.
    assert stderr.startswith(("hello: queued\n", "hello: starting on 1 GPU\n"))
    assert "hello: succeeded after" in stderr
    assert list((work / "t").iterdir()) == []


def test_a_failure_ends_with_1_and_keeps_the_log(work):
    code, stdout, stderr = finished(start(work, "hello.py", "3"))
    assert (code, stdout) == (1, "hello 3\n")
    assert "hello: failed" in stderr
    assert "exit code 3" in stderr
    [kept] = (work / "t").glob("pollux-run-*")
    assert str(kept) in stderr
    assert [path.read_text() for path in kept.rglob("0.log")] == ["hello 3\n"]


def test_reports_reach_the_engine_and_only_those_of_the_job(work):
    code, stdout, stderr = finished(start(work, "--json", "report.py"))
    assert code == 0
    answers = [line for line in stderr.splitlines() if line == "200" or line.startswith("(")]
    assert answers == [
        "200", "(422, 'InvalidInput')", "(403, 'Forbidden')", "(422, 'InvalidInput')",
    ]  # fmt: skip
    assert json.loads(stdout)["job"]["loss"] == 0.125


def test_ctrl_c_lets_it_save(work):
    with tempfile.TemporaryDirectory(prefix="pollux-") as home:
        process = start(work, "--home", home, "wait.py")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            code, stdout, stderr = finished(process)
        finally:
            process.kill()
        assert (code, stdout) == (130, "saved\n")
        assert "Ctrl-C again kills it" in stderr
        assert (Path(home) / "logs").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_it_lets_it_save_and_what_was_saved_is_kept(work, number):
    process = start(work, "save.py")
    try:
        assert process.stdout is not None
        word, pid = process.stdout.readline().split()
        assert word == "new"
        process.send_signal(number)
        if number != signal.SIGINT:
            process.send_signal(number)  # `timeout` and terminals send these twice
        code, _, stderr = finished(process)
    finally:
        process.kill()
    assert code == 128 + number
    assert not Path(f"/proc/{pid}").exists(), "the job runs on"
    [kept] = (work / "t").glob("pollux-run-*")
    assert (kept / "checkpoints" / "save" / "state").read_text() == "saved"
    assert f"logs and checkpoints: {kept}/" in stderr
    assert f"'pollux run --home {kept}' with the same script goes on from there" in stderr
    code, stdout, _ = finished(start(work, "--home", str(kept), "save.py"))
    assert (code, stdout.split()[0]) == (0, "resumed")


def test_its_job_saves_and_ends_where_it_is_killed_itself(work):
    """Nobody would ever look after that job again."""
    process = start(work, "save.py")
    try:
        assert process.stdout is not None
        word, pid = process.stdout.readline().split()
        assert word == "new"
    finally:
        process.kill()
        process.communicate()
    end = time.monotonic() + PATIENCE_SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists(), "the job runs on"
    [kept] = (work / "t").glob("pollux-run-*")
    assert (kept / "checkpoints" / "save" / "state").read_text() == "saved"


def test_a_signal_that_is_ignored_stays_so(work):
    """As `nohup` has it."""
    held = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(work, "save.py", hears=False)
    finally:
        signal.signal(signal.SIGHUP, held)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert finished(process)[0] == 128 + signal.SIGTERM
    finally:
        process.kill()


def test_one_that_was_stopped_before_it_saved_leaves_nothing(work):
    process = start(work, "wait.py")
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        code, stdout, stderr = finished(process)
    finally:
        process.kill()
    assert (code, stdout) == (143, "saved\n")
    assert "logs and checkpoints" not in stderr
    assert not list((work / "t").glob("pollux-*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.py"], "absent.py"),
        (["--gpus", "3", "hello.py", "0"], "--gpus asks for at least 3, and 2 are here"),
        (["--gpus", "x", "hello.py", "0"], "gpus"),
        (["--policy", "optimus-oracle", "hello.py", "0"], "oracle"),
        ([], "SCRIPT"),
    ],
)
def test_refusals_are_one_line(work, words, said):
    code, stdout, stderr = finished(start(work, *words))
    assert code == 2
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert said in stderr
    assert not list((work / "t").glob("pollux-*"))
