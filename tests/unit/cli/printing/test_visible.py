"""Text of other people on the terminal: no command lets it steer cursor, title, keyboard or direction of writing."""

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pollux import cli
from pollux.cli.printing.console import SafeConsole
from pollux.wire.visible_text import one_sign_each, visible, visible_log

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
ATTACK = "\x1b]0;mine\x07\x1b[2J\x9b31m\r\u202egpj.exe\u2066\x7f"
OURS = ("id", "state", "code", "queue", "priority", "policy", "trigger", "backend", "version", "gpu_type")


def hostile(value, key=""):
    """The same answer, with every text that is foreign ending in the attack."""
    if isinstance(value, dict):
        return {name: hostile(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, key) for each in value]
    return value + ATTACK if isinstance(value, str) and key not in OURS else value


@pytest.mark.parametrize("character", [*map(chr, range(0x20)), *"\x7f\x9b\u2028\u202e\u2069"])
def test_every_unsafe_character_is_written_out(character):
    kept = "\t\n"
    assert (visible(character) == character) == (character in kept)
    assert (visible_log(character) == character) == (character in kept + "\r")


@pytest.mark.parametrize("filtered", [visible, visible_log, one_sign_each])
@given(
    st.text(st.sampled_from("a\x9b\u202e\udcc2\udc9b\udce2\udc80\udcae\udcfc\udcd8\udc9c\udc1b\ud83d\xe9"), max_size=12)
)
def test_bytes_that_are_no_text_do_not_become_controls_on_their_way_out(filtered, text):
    """`os.fsdecode` stands for a byte by such a character; whoever writes it may choose the bytes of any other."""
    shown = filtered(text).encode(
        "utf-8", "surrogateescape" if "\ud83d" not in text and "\udc1b" not in text else "replace"
    )
    assert not re.search("[\x80-\x9f\u061c\u202e]", shown.decode("utf-8", "replace"))
    assert not re.search(rb"(?<![\xc2-\xf4\x80-\xbf])[\x80-\x9f]", shown), "a terminal of one byte for a character"


def test_the_name_of_a_file_that_is_no_text_is_printed_as_it_is():
    assert visible("caf\udce9.py") == "caf\udce9.py"
    assert visible("caf\udcc3\udca9.py") == "café.py"


def test_a_json_document_stays_the_same_document():
    value = {"name": ATTACK, "ü": "→ 漢字"}
    document = json.dumps(value, ensure_ascii=False, indent=2)
    assert json.loads(visible(document)) == value
    assert not UNSAFE.search(visible(document))


@pytest.fixture
def attacked(fake):
    job = fake.job("resnet", name="resnet", detail="last words", after=["first"], resize_kind="live")
    queue = {"name": "default", "weight": 1.0, "gpu_quota": 8, "jobs": 2, "used": 4}
    fake.answers.update(
        {
            ("GET", "/v1/status"): hostile({**fake.status, "warnings": ["the disk is full"]}),
            ("GET", "/v1/jobs"): hostile({"jobs": [job, {**job, "state": "failed"}], "next": None}),
            ("GET", "/v1/jobs/resnet"): hostile(
                {
                    "job": job,
                    "request": {"name": "resnet", "run": ["python", "train.py"], "env": {"A": "b"}, "workdir": "/x"},
                    "events": [{"at": 1.0, "kind": "placed", "text": "given 4 GPUs"}],
                    "eta_quality": None,
                }
            ),
            ("GET", "/v1/jobs/resnet/explain"): hostile({"text": "shrunk", "next_step": "show"}),
            ("GET", "/v1/queues"): hostile({"queues": [queue]}),
            ("POST", "/v1/jobs/resnet/cancel"): (409, hostile(fake.error("Conflict", "it is not running"))),
        }
    )  # fmt: skip
    return fake


@pytest.mark.parametrize(
    "words", [("ls",), ("ls", "--json"), ("show", "resnet"), ("show", "resnet", "--json"), ("explain", "resnet"),
              ("explain", "resnet", "--json"), ("queues",), ("top", "--once"), ("top", "--json"),
              ("cancel", "resnet"), ("doctor",)]
)  # fmt: skip
def test_no_command_prints_it_as_it_is(run, attacked, words):
    result = run(*words)
    assert result.exit_code == (2 if words[0] == "cancel" else 0), result.output
    assert len(attacked.asked) > 0
    assert not UNSAFE.search(result.stdout + result.stderr)
    if "--json" in words:
        json.loads(result.stdout)


def test_a_live_screen_has_only_the_codes_of_its_own(tmp_path):
    """On a terminal the console's own colours and cursor moves are there, and nothing else."""
    with (tmp_path / "screen").open("w+") as file:
        console = SafeConsole(file, force_terminal=True, width=200)
        with Live(console=console, auto_refresh=False) as live:
            table = Table("name")
            table.add_row(Text("job" + ATTACK, style="red"))
            live.update(table, refresh=True)
            console.print("a line" + ATTACK, markup=False)
        file.seek(0)
        written = file.read()
    assert "\x1b[31m" in written
    for part in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\u202e"):
        assert part not in written


def test_every_print_of_the_command_line_goes_through_the_filter():
    """`typer.echo`, `print`, rich's own Console and writes to the streams are for the two modules of the filter."""
    found = []
    for path in sorted(Path(cli.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("typer.echo", "print", "Console", "typer.secho", "sys.stdout.write", "sys.stderr.write"):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    allowed = (
        "visible.py: typer.echo(",
        "streams.py: print(",  # at the end, when standard output is lost
        "logs.py: sys.stdout.write(text if raw or not sys.stdout.isatty() else visible_log(text))",
        ": typer.echo(ctx.get_help())",
    )
    assert [call for call in found if not any(part in call for part in allowed)] == []
