"""Writes the generated parts of `cli.md`: usage and options of every command, from the commands themselves.

    python docs/make_cli.py [--check]

A part lies between `<!-- options of pollux ... -->` and `<!-- end -->`; everything else on the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from pollux.cli.main import app

PAGE = Path(__file__).with_name("cli.md")
PART = re.compile(r"<!-- options of (pollux[^\n]*?) -->\n.*?<!-- end -->", re.DOTALL)
ADDED_BY_TYPER = {"--help", "--install-completion", "--show-completion"}


def commands(command: Any, words: tuple[str, ...] = ("pollux",)) -> Iterator[tuple[str, Any]]:
    """Every visible command with the words a user types for it."""
    yield " ".join(words), command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, (*words, name))


def usage(words: str, command: Any) -> str:
    """What to type."""
    context = command.make_context(words, [], resilient_parsing=True)
    with context:
        return " ".join([words, *command.collect_usage_pieces(context)])


def row(parameter: Any) -> str | None:
    """A line of the table; None for what every command has."""
    if parameter.param_type_name == "argument":
        name, default = parameter.metavar or parameter.human_readable_name, None
    else:
        flags = [flag for flag in (*parameter.opts, *parameter.secondary_opts) if flag not in ADDED_BY_TYPER]
        if not flags or parameter.hidden:
            return None
        longest = sorted(flags, key=lambda flag: (not flag.startswith("--"), flag.startswith("--no-")))
        value = "" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}"
        name = "`, `".join([longest[0] + value, *longest[1:]])
        default = None if parameter.is_flag and not parameter.default else parameter.default
    shown = "" if default in (None, (), []) else f"`{_plain(default)}`"
    if parameter.param_type_name == "option" and parameter.is_flag and parameter.default:
        shown = "on"
    return f"| `{name}` | {shown} | {parameter.help} |"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _escaped(line: str) -> str:
    """Bars inside code would end a table's cell."""
    return re.sub(r"`[^`]*`", lambda code: code.group().replace("|", r"\|"), line)


def part(words: str, command: Any) -> str:
    """Usage and table of one command, with the marks around them."""
    rows = [_escaped(line) for parameter in command.params if (line := row(parameter))]
    table = ["", "| option | default | meaning |", "|---|---|---|", *rows] if rows else []
    lines = [f"<!-- options of {words} -->", "", "```", usage(words, command), "```", *table, "", "<!-- end -->"]
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with its generated parts made anew; every command must have one."""
    parts = {words: part(words, command) for words, command in commands(typer.main.get_command(app))}
    absent = [words for words in parts if f"<!-- options of {words} -->" not in page]
    if absent:
        raise SystemExit(
            f"cli.md has no part for {', '.join(absent)}: add '<!-- options of ... -->' and '<!-- end -->'"
        )
    return PART.sub(lambda found: parts[found.group(1)], page)


def main() -> None:
    """Write the page, or say whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = renewed(before)
    if check and after != before:
        raise SystemExit("cli.md is not current: run 'python docs/make_cli.py'")
    PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
