"""What the README tells people to type is there, and what it shows is what comes out."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from pollux.cli.main import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_it_fits_two_screens():
    assert len(README.splitlines()) <= 80


def test_make_targets_exist():
    for target in re.findall(r"make ([a-z]+)", README):
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target


def test_linked_files_exist():
    root = Path(__file__).parents[2]
    for link in re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README):
        assert link.startswith("http") or (root / link).exists(), link


@pytest.mark.parametrize(
    "line", [line for block in blocks("") for line in block.splitlines() if line.startswith("pollux ")]
)
def test_commands_and_options_exist(line):
    command, words = get_command(app), line.split()[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_python_example_gives_the_average_in_the_table(capsys):
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    hours = float(capsys.readouterr().out.split()[0])
    shown = re.search(r"\| `pollux` \| \*\*([0-9.]+) h\*\*", README)
    assert shown is not None
    assert f"{hours:.2f}" == shown.group(1)
