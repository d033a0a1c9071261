"""`pollux ls`: the jobs of the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.arguments.options import Json, complete_queues, print_json, whole
from pollux.cli.printing.visible import say

if TYPE_CHECKING:
    from pollux.cli.client.client import Client

__all__ = ["ls"]

_PAGE = 1000
_USUAL = 100


def ls(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include jobs that have ended.")] = False,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help="Only jobs in this state, such as running or failed.")
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=complete_queues, help="Only jobs of this queue."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", parser=whole(1), help="The most jobs to list; by default 100.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List jobs: state, GPUs, batch, goodput, progress, ETA and why.

    Example: pollux ls --state running
    """
    from pollux.cli.client.client import connect

    client = connect()
    most = limit or _USUAL
    jobs, cursor = _first_jobs(client, most, state=state, queue=queue, active=None if everything or state else True)
    if as_json:
        print_json({"jobs": jobs, "next": cursor})
        return
    from pollux.cli.display.warnings_output import print_warnings

    if not jobs:
        say("no jobs" if everything or state or queue else "no unfinished jobs; 'pollux ls --all' has the others")
        print_warnings(client)
        return
    from pollux.cli.display.render import standard_output
    from pollux.cli.display.tables import jobs_table

    console = standard_output()
    console.print(jobs_table(jobs, client.now, console.width))
    if cursor is not None:
        say(f"the first {len(jobs)}; --limit {10 * most} shows more")
    print_warnings(client)


def _first_jobs(client: Client, most: int, **filters: Any) -> tuple[list[dict[str, Any]], str | None]:
    """The first jobs that pass the filters, and where the next page starts; None if there is no next page."""
    jobs: list[dict[str, Any]] = []
    cursor = None
    while len(jobs) < most:
        answer = client.get("/v1/jobs", limit=min(most - len(jobs), _PAGE), after=cursor, **filters)
        jobs += answer["jobs"]
        cursor = answer.get("next")
        if cursor is None:
            break
    return jobs, cursor
