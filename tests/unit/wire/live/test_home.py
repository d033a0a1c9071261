"""The live protocol has one home: no key, variable, exit code or activity of it is written out anywhere else."""

import ast
import re
from pathlib import Path

import pytest

import pollux
from pollux.wire.live import exit_codes, store_channel

ROOT = Path(pollux.__file__).parent
HOME = ROOT / "wire" / "live"
ELSEWHERE = [path for path in sorted(ROOT.rglob("*.py")) if HOME not in path.parents]
KINDS = "beat|committed|done|door|ends|failed|group|handed|handover|here|lost|plan|ready|received|saves|watch|withdrawn"
KEY = re.compile(rf"pollux/(live|group|jobs?)\b.*|committed|({KINDS})/(\d.*)?")
VARIABLES = {store_channel.SECRET_VARIABLE, store_channel.STORE_VARIABLE, store_channel.JOIN_VARIABLE}
# The table of all variables for people.
EXPLAINED = ROOT / "wire" / "environment.py"
EXIT_CODES = {exit_codes.RESTART, exit_codes.STOPPED}
# A time limit of the web server, in seconds.
NO_EXIT_CODES = {"timeout_keep_alive"}


def is_activity(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("busy", "activity")


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def writes_out(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=bytes() as start):
            return start == store_channel.GREETING
        case ast.Constant(value=str() as text):
            return KEY.fullmatch(text) is not None or text in VARIABLES
        case ast.Constant(value=int() as number):
            return number in EXIT_CODES
        case ast.Compare():
            return is_activity(node.left) and any(map(is_text, node.comparators))
        case ast.Assign():
            return any(map(is_activity, node.targets)) and is_text(node.value)
    return False


def literals(source: str) -> list[int]:
    """The lines on which a source writes the protocol out."""
    tree = ast.parse(source)
    excused = {id(word.value) for word in ast.walk(tree) if isinstance(word, ast.keyword) and word.arg in NO_EXIT_CODES}
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt))
    return [node.lineno for node in nodes if id(node) not in excused and writes_out(node)]


@pytest.mark.parametrize(
    "line",
    [
        'store.set(f"beat/{generation}/{rank}", "")', 'store.get("committed")', 'connection.send(b"pollux/1")',
        'key = "withdrawn/3"', 'PREFIX = "pollux/live/"', 'f"watch/{number}/{name}"', 'f"pollux/job/{number}"',
        'store.add(f"pollux/jobs/{rank}", 1)', 'PrefixStore("pollux/group", store)', 'f"handover/{generation}"',
        'environ["POLLUX_STORE"] = address', 'variables.get("POLLUX_JOIN")', '{"POLLUX_STORE_SECRET": ""}',
        "sys.exit(75)", "code = 143", 'live.beat.busy = "checkpoint"', 'if beat.activity == "data": pass',
    ],
)  # fmt: skip
def test_the_protocol_written_out_is_seen(line):
    assert literals(line) == [1]


def test_the_protocol_is_written_out_nowhere_else():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in ELSEWHERE
        if path != EXPLAINED and (lines := literals(path.read_text()))
    }
    assert found == {}
