"""The command itself: help, version, usage errors, interrupts and closed pipes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import typer.main
from tests.support.surroundings import hearing

import pollux
from pollux.cli.main import app
from pollux.testing.waiting import PATIENCE_SECONDS

COMMANDS = (["simulate"], ["policies"], ["workload"], ["workload", "generate"])


def start(*words, **options):
    command = [sys.executable, "-m", "pollux", *words]
    with hearing(signal.SIGINT):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_version(run):
    assert run("--version").stdout == f"pollux {pollux.__version__}\n"


def test_alone_it_explains_itself(run):
    result = run()
    assert result.exit_code == 0
    assert result.stdout == run("--help").stdout
    assert "simulate" in result.stdout


@pytest.mark.parametrize("words", [[], *COMMANDS], ids=" ".join)
def test_help_has_an_example(run, words):
    for flag in ("--help", "-h"):
        result = run(*words, flag)
        assert result.exit_code == 0
        assert "Example: pollux" in result.stdout


def test_every_command_has_json():
    def leaves(command):
        children = getattr(command, "commands", {})
        return [leaf for child in children.values() for leaf in leaves(child)] or [command]

    for command in leaves(typer.main.get_command(app)):
        assert any("--json" in parameter.opts for parameter in command.params), command.name


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["simulat"], ["'simulat'", "did you mean 'simulate'", "pollux --help"]),
        (["--versio"], ["--versio", "pollux --help"]),
        (["workload", "generat"], ["'generat'", "pollux workload --help"]),
        (["policies", "extra"], ["extra", "pollux policies --help"]),
        (["simulate", "--nodes"], ["--nodes", "argument"]),
    ],
)
def test_usage_errors_are_one_line(run, words, fragments):
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert [fragment for fragment in fragments if fragment.lower() not in result.stderr.lower()] == []


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        (["ls", "--json"], 69, "Unreachable"),
        (["ls", "--json", "--colour"], 2, "UsageError"),
        (["simulate", "--json", "--policies", "pollx"], 2, "UnknownName"),
        (["workload", "generate", "--json", "--jobs", "none"], 2, "UsageError"),
        (["submit", "--json", "no.yaml"], 2, "InvalidInput"),
        (["run", "--json", "--gpus", "0", "train.py"], 2, "InvalidInput"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_document_with_json(run, tmp_path, monkeypatch, words, code, kind):
    monkeypatch.setenv("POLLUX_HOME", str(tmp_path))
    monkeypatch.delenv("POLLUX_SERVER", raising=False)
    result = run(*words)
    told = json.loads(result.stdout)["error"]
    assert (result.exit_code, told["exit_code"], told["code"]) == (code, code, kind)
    assert result.stderr == f"error: {told['message']}\n"


@pytest.mark.parametrize("words", [["submit", "no.yaml", "--", "prog", "--json"], ["run", "no.py", "--json"]])
def test_json_that_belongs_to_a_script_is_not_ours(run, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")


def test_help_loads_no_numpy():
    code = (
        "import sys; from pollux.cli.main import app; sys.argv = ['pollux', '--help']\n"
        "try: app()\n"
        "except SystemExit: print('numpy' in sys.modules, 'pollux.sim' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False False"


def wait_until(happened, seconds=PATIENCE_SECONDS):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_interrupt_ends_it_and_its_workers(tmp_path):
    # The genetic search takes minutes, so that it lasts until it is interrupted.
    words = ["--policies", "pollux-genetic,las", "--workers", "2", "--output", str(tmp_path / "r.json")]
    process = start("simulate", *words, start_new_session=True)
    try:
        wait_until(lambda: any(tmp_path.iterdir()))
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert (process.returncode, stdout, stderr) == (130, "", "error: interrupted; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: is_gone(process.pid))


def test_closed_pipe_is_no_error():
    process = start("policies")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=PATIENCE_SECONDS)
