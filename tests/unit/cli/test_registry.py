"""Every command: its summary is true, its help has an example, and it is imported only when it is used."""

import json
import subprocess
import sys

import pytest
import typer.main

from pollux.cli.main import app
from pollux.cli.registry import COMMANDS

EXPECTED = {
    "up", "down", "run", "submit", "ls", "top", "show", "explain", "logs", "cancel", "pause", "resume", "resize",
    "nodes", "queues", "simulate", "whatif", "workload", "policies", "backends", "doctor", "config", "history",
}  # fmt: skip


def words_of(command, words=()):
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from words_of(child, (*words, name))


EVERY = [words for words, _ in words_of(typer.main.get_command(app))]


def test_all_commands_are_there():
    assert set(COMMANDS) == EXPECTED


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_is_how_the_help_begins(name):
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert " ".join((commands[name].help or "").split()).startswith(COMMANDS[name][1])


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_has_an_example(run, words):
    for flag in ("--help", "-h"):
        result = run(*words, flag)
        assert result.exit_code == 0, result.stderr
        assert f"pollux {' '.join(words)}".strip() in result.stdout
        assert "Example: " in result.stdout


def test_help_lists_every_command_with_its_summary(run):
    text = " ".join(run("--help").stdout.split())
    assert [name for name, (_, summary) in COMMANDS.items() if f"{name} {summary}" not in text] == []


def loaded_by(*words, home):
    code = (
        "import sys, json; from pollux.cli.main import app; sys.argv = ['pollux', *sys.argv[1:]]\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, check=True, env={"POLLUX_HOME": str(home), "PATH": ""},
    )  # fmt: skip
    return json.loads(result.stderr.splitlines()[-1])


HEAVY = {"numpy", "scipy", "torch", "starlette", "uvicorn", "ruamel.yaml", "sqlite3", "matplotlib"}


def test_help_imports_no_command(tmp_path):
    modules = set(loaded_by("--help", home=tmp_path))
    commands = {target.partition(":")[0] for target, _ in COMMANDS.values()}
    assert modules & commands == set()
    assert modules & (HEAVY | {"rich.table", "http.client", "pollux.sim", "pollux.service"}) == set()


@pytest.mark.parametrize("words", [("ls",), ("top", "--once")])
def test_options_that_were_not_given_are_not_converted(fake, words):
    assert "pydantic" not in loaded_by(*words, home=fake.home)


@pytest.mark.parametrize("words", [("ls",), ("explain", "x"), ("logs", "x"), ("cancel", "x"), ("top", "--once")])
def test_commands_that_ask_the_service_load_nothing_heavy(fake, words):
    modules = set(loaded_by(*words, home=fake.home))
    assert "pollux.cli.client.client" in modules
    assert modules & (HEAVY | {"pollux.sim", "pollux.service", "pollux.policies", "pollux.controller"}) == set()
