"""What would be red on another machine only: names of tests that have moved, and paths with blanks."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_what_runs_in_other_surroundings_is_there():
    specification = importlib.util.spec_from_file_location("environments", ROOT / "tools" / "test_environments.py")
    tool = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = tool
    specification.loader.exec_module(tool)
    assert len(tool.TESTS) == len(set(tool.TESTS)) > 10
    assert [path for path in tool.TESTS if not (ROOT / path).is_file()] == []


def among_words(text: str) -> Iterator[int]:
    """Lines of texts that have the path of the interpreter as it is among other words."""
    for node in ast.walk(ast.parse(text)):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        said = [ast.unparse(part.value) for part in parts if isinstance(part, ast.FormattedValue)]
        if len(parts) > 1 and "sys.executable" in said:
            yield node.lineno


def test_no_test_needs_an_interpreter_whose_path_has_no_blanks_and_quotes():
    """Write `run: {json.dumps([sys.executable, 'train.py'])}`, or use `shlex`."""
    found = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in among_words(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('f"run: {sys.executable} train.py"', [1]),
        ('f"{sys.executable} train.py"', [1]),
        ('f"#!{sys.executable}\\n"', [1]),
        ("f\"run: ['{sys.executable}', train.py]\"", [1]),
        ('f"{shlex.quote(sys.executable)} train.py"', []),
        ('f"{sys.executable}"', []),
    ],
)
def test_such_a_need_is_seen(text, lines):
    assert list(among_words(text)) == lines
