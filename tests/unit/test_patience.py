"""No test may be red because a machine is slow: what a test waits for it waits for with the patience of all tests."""

import ast
import re
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
# How long somebody may be silent before he is given up: on a busy machine processes are silent for seconds.
SILENCES = {"hang_seconds", "lease_seconds", "lost_seconds"}
SILENCE_VARIABLE = re.compile(r"POLLUX_(HANG|LEASE|LOST)_SECONDS")
SHORTEST_SILENCE_SECONDS = 20.0
# Where giving up is what is tested, more often than a test may take.
MAY_BE_HASTY = {
    f"tests/{name}.py"
    for name in ("faults/test_live_events", "integration/local/test_live", "integration/local/test_live_fallback")
}
WITH_PROCESSES = ("tests/browser", "tests/conformance", "tests/faults", "tests/integration", "tests/support")
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
            found += node.args[1:2] if name == "until" else []
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


def silences(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and values of arguments, defaults and variables that say how long somebody may be silent."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((each.arg or "", each.value) for each in node.keywords)
            if getattr(node.func, "attr", "") == "setenv" and len(node.args) > 1:
                yield ast.unparse(node.args[0]).strip("'"), node.args[1]
        elif isinstance(node, ast.Dict):
            yield from (
                (str(getattr(key, "value", "")), value) for key, value in zip(node.keys, node.values, strict=True)
            )
        elif isinstance(node, ast.FunctionDef):
            defaults = node.args.defaults
            yield from (
                (each.arg, value)
                for each, value in zip(node.args.args[len(node.args.args) - len(defaults) :], defaults, strict=True)
            )
            yield from (
                (each.arg, value) for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            )


def too_hasty(text: str) -> list[int]:
    """Lines where somebody is given up after a silence that a busy machine may cause."""
    found = []
    for name, value in silences(ast.parse(text)):
        if (name in SILENCES or SILENCE_VARIABLE.fullmatch(name)) and isinstance(value, ast.Constant) and value.value:
            found += [value.lineno] if float(value.value) < SHORTEST_SILENCE_SECONDS else []
    return sorted(found)


def too_short(text: str) -> list[int]:
    found = [(line, value) for line, value in limits(ast.parse(text)) if MOMENT_SECONDS < value < PATIENCE_SECONDS]
    return sorted(line for line, _ in found)


def test_whoever_waits_has_patience():
    """Say PATIENCE_SECONDS, or nothing where that is the default."""
    hasty = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in too_short(path.read_text())]
    assert hasty == []


def test_nobody_is_given_up_because_the_machine_is_busy():
    """Give 20 seconds or more; they cost nothing where nobody is silent."""
    within = [path for path in FILES if str(path.relative_to(ROOT)).startswith(WITH_PROCESSES)]
    hasty = {str(path.relative_to(ROOT)): too_hasty(path.read_text()) for path in within}
    assert {name for name, lines in hasty.items() if lines} == MAY_BE_HASTY


@pytest.mark.parametrize(
    "text",
    [
        "LocalBackend(home, hang_seconds=2.5)",
        "RayRun(address, lease_seconds=4.0)",
        "Service(home, POLLUX_LOST_SECONDS='8')",
        "{'POLLUX_LEASE_SECONDS': '6'}",
        "patch.setenv('POLLUX_HANG_SECONDS', '3')",
        "def backend(home, lease_seconds=4.0): ...",
        "def backend(home, *, lost_seconds=4.0): ...",
    ],
)
def test_haste_is_seen(text):
    assert too_hasty(text) == [1]


def test_patience_is_not_taken_for_haste():
    assert too_hasty("f(hang_seconds=20.0, lost_seconds=None, lease_seconds=lease, POLLUX_LOST_SECONDS='25')") == []


@pytest.mark.parametrize(
    "text",
    [
        "process.wait(30)",
        "shim.until(lambda: shim.told, 20.0)",
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
