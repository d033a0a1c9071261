"""How option values are read, and the arguments that many commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from pollux.cli.printing.visible import say
from pollux.core.errors import PolluxError, UnknownName

__all__ = [
    "PARTIAL",
    "Job",
    "Json",
    "complete_jobs",
    "complete_policies",
    "complete_queues",
    "print_json",
    "real",
    "trigger",
    "whole",
]


PARTIAL = "pollux.partial"
"""A context's `meta` has the results before an error under this key; `--json` prints them with the error."""


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of unfinished jobs that begin with the text, for the shell; empty if no service answers."""
    from pollux.cli.client.client import connect

    try:
        answer = connect(timeout=2.0).get("/v1/jobs", active=True, limit=1000)
    except PolluxError:
        return []
    return [str(job["id"]) for job in answer["jobs"] if str(job["id"]).startswith(incomplete)]


def complete_queues(incomplete: str) -> list[str]:
    """Names of queues that begin with the text; empty if no service answers."""
    from pollux.cli.client.client import connect

    try:
        answer = connect(timeout=2.0).get("/v1/queues")
    except PolluxError:
        return []
    return [str(queue["name"]) for queue in answer["queues"] if str(queue["name"]).startswith(incomplete)]


def complete_policies(incomplete: str) -> list[str]:
    """Names of policies that begin with the text; in a list with commas, with the last name."""
    import pollux.policies as policies

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in policies.names() if name.startswith(last)]


Job = Annotated[str, typer.Argument(metavar="JOB", autocompletion=complete_jobs, help="The job's id.")]
"""A job's id."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
"""Whether to print JSON."""


def print_json(value: Any) -> None:
    """Print one JSON document on standard output, with JSON's escapes if the encoding lacks a character."""
    import codecs
    import json
    import sys

    text = json.dumps(value, indent=2, ensure_ascii=False)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode("utf-8" if codecs.lookup(encoding).name == "utf-8" else "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2)
    say(text)


def whole(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers, `minimum` or more."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise typer.BadParameter(f"'{value}': give a whole number, {minimum} or more")
        return number

    return parse


def real(allowed: Callable[[float], bool] = math.isfinite, remedy: str = "") -> Callable[[str], float]:
    """A parser of finite numbers that are `allowed`; `remedy` describes them in the error."""

    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and allowed(number)):
            raise typer.BadParameter(f"'{value}': give a finite number{remedy and ', '}{remedy}")
        return number

    return parse


def trigger(value: str) -> Literal["rounds", "events"]:
    """Read `rounds` or `events`."""
    if value == "rounds":
        return "rounds"
    if value == "events":
        return "events"
    raise UnknownName("--trigger", value, ("rounds", "events"))
