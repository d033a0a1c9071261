"""No test may be red because a machine is slow: what a test waits for it waits for with the patience of all tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "src" / "pollux" / "testing").rglob("*.py")])
# Whose one argument is a number of seconds, and whose keywords are.
ALONE = {"acquire", "communicate", "join", "result", "settimeout", "wait"}
NAMED = {"HTTPConnection", "HTTPSConnection", "acquire", "check_output", "communicate", "create_connection", "run"}
NAMED |= {"urlopen", "wait", "wait_for", "wait_until"}
WAITS = {("seconds", name) for name in NAMED | {"until"}}
# A moment in which nothing may happen is not a limit: a slow machine passes.
MOMENT_SECONDS, LONGEST_MOMENT_SECONDS = 1.0, 5.0


def is_moment(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value <= LONGEST_MOMENT_SECONDS


def limits(tree: ast.AST) -> Iterator[tuple[int, float]]:
    """Line and value of what is written as a number where somebody waits."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            of_text = isinstance(getattr(node.func, "value", None), ast.Constant)  # "/".join(parts)
            found += node.args if name in ALONE and len(node.args) == 1 and not of_text else []
            found += node.args[2:3] if name in ("wait", "wait_for", "wait_until") else []
            found += [each.value for each in node.keywords if name in NAMED and each.arg in ("seconds", "timeout")]
        elif isinstance(node, ast.FunctionDef):
            given = node.args.args + node.args.kwonlyargs
            values = (
                [None] * (len(node.args.args) - len(node.args.defaults)) + node.args.defaults + node.args.kw_defaults
            )
            named = zip(given, values, strict=True)
            found += [
                value for argument, value in named if argument.arg == "timeout" or (argument.arg, node.name) in WAITS
            ]
        elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.Call) and isinstance(node.op, ast.Add):
            name = getattr(node.left.func, "attr", "")
            found += [node.right] if name == "monotonic" and not is_moment(node.right) else []
        # As in `60 + 5 * events`.
        found += [part for each in found if isinstance(each, ast.BinOp) for part in (each.left, each.right)]
        for value in found:
            if isinstance(value, ast.Constant) and type(value.value) in (int, float):
                yield value.lineno, value.value


def too_short(text: str) -> list[int]:
    found = [(line, value) for line, value in limits(ast.parse(text)) if MOMENT_SECONDS < value < PATIENCE_SECONDS]
    return sorted(line for line, _ in found)


def test_whoever_waits_has_patience():
    """Say PATIENCE_SECONDS, or nothing where that is the default."""
    hasty = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in too_short(path.read_text())]
    assert hasty == []


@pytest.mark.parametrize(
    "text",
    [
        "process.wait(30)",
        "subprocess.run(words, timeout=60)",
        "subprocess.run(words, timeout=60 + 5 * events)",
        "thread.join(5.0)",
        "wait_until('end', look, 20.0, 0.1)",
        "bench.wait('end', look, seconds=20)",
        "def wait(what, is_so, seconds=60.0): ...",
        "def ask(path, *, timeout=30): ...",
        "deadline = time.monotonic() + 60.0",
    ],
)
def test_a_short_limit_is_seen(text):
    assert too_short(text) == [1]


@pytest.mark.parametrize(
    "text",
    [
        "process.wait()",
        "', '.join(names)",
        "assert not ended.wait(0.5)",
        "clock.wait(lambda: 1, 60.0)",
        "run(words, 60)",
    ],
)
def test_what_limits_nothing_is_left_alone(text):
    assert too_short(text) == []
