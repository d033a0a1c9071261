"""The README's transcript, typed again: the same commands print lines of the same shape."""

import json
import os
import re
import shlex
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli.main import app

ROOT = Path(__file__).parents[3]
LEFT_OUT = "…"
STATES = "queued|starting|running|resizing|paused|succeeded|failed|cancelled"


def transcript() -> list[tuple[str, list[str]]]:
    """Commands of the README and the lines shown below each; what follows `#` is for the reader."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)
    block = next(text for text in found if text.startswith("$ pollux up"))
    steps: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:].partition("#")[0].strip(), []))
        else:
            steps[-1][1].append(line.rstrip())
    return steps


def shape(line: str) -> str:
    """A line without what differs from run to run: addresses, folders, numbers."""
    line = re.sub(r"https?://\S+", "URL", line)
    line = re.sub(r"(~|/)[\w./~-]*/(\w+)", r"FOLDER/\2", line)
    line = re.sub(r"\d+(\.\d+)*", "N", line)
    return " ".join(line.split()).replace("GPUs", "GPU")


def row_shape(line: str) -> str:
    """A line of `pollux ls`: its job; where the job stands depends on the moment."""
    if set(line.strip()) == {"─"}:
        return "─"
    match = re.match(rf"(\S+)\s+({STATES})\s+\d+/(\d+)\s", line)
    return f"{match[1]} of {match[3]}" if match else " ".join(line.split())


def compared(command: str, shown: list[str], printed: list[str]) -> None:
    form = row_shape if command.startswith("pollux ls") else shape
    expected = "".join("(.*\n)*" if line.strip() == LEFT_OUT else f"{re.escape(form(line))}\n" for line in shown)
    found = "".join(f"{form(line.rstrip())}\n" for line in printed)
    assert re.fullmatch(expected, found), f"{command}:\n{found}is not as the README shows it:\n{expected}"


@pytest.fixture
def run(monkeypatch):
    """Types a command in the repository's folder, under a home that is short, since sockets lie in it."""
    monkeypatch.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="pollux-") as folder:
        # The example's `python` is that of the environment that Pollux is installed in, also where PATH has none.
        monkeypatch.setenv("PATH", folder)
        home = Path(folder) / "h"
        environment = {"POLLUX_HOME": str(home), "POLLUX_SERVER": None, "POLLUX_TOKEN": None}

        def typed(*words):
            return CliRunner().invoke(app, [*words], prog_name="pollux", env=environment)

        try:
            yield typed
        finally:
            typed("down")
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(json.loads((home / "service.json").read_text())["pid"], signal.SIGKILL)


def test_what_was_typed_prints_what_is_shown(run):
    steps = transcript()
    assert [command.split()[1] for command, _ in steps][:3] == ["up", "submit", "ls"]
    jobs = []
    for command, shown in steps:
        words = shlex.split(command)[1:]
        # The usual port may be taken where tests run side by side.
        result = run(*words, "--port", "0") if words[0] == "up" else run(*words)
        assert result.exit_code == 0, f"{command}: {result.stderr}"
        compared(command, shown, result.stdout.splitlines())
        if words[0] == "submit":
            jobs.append(result.stdout.partition(":")[0])
    assert json.loads(run("cancel", *jobs, "--json").stdout)["failed"] == []
