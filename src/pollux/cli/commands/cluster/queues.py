"""`pollux queues`: lists queues, and sets them up."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pollux.cli.arguments.options import Json, complete_queues, print_json, real, whole
from pollux.cli.printing.visible import say
from pollux.core.errors import InvalidInput

__all__ = ["app", "queues", "set_queue"]

_WIDTH = real(lambda value: 0 < value <= 1e6, "above 0, at most 1000000")

app = typer.Typer(invoke_without_command=True, epilog="Example: pollux queues set vision --weight 2 --quota 8")


def _quota(value: str) -> int | str:
    return value if value == "none" else whole(0)(value)


@app.callback()
def queues(ctx: typer.Context, as_json: Json = False) -> None:
    """List queues: weight, quota, GPUs in use, jobs; 'pollux queues set' changes them."""
    if ctx.invoked_subcommand is not None:
        return
    from pollux.cli.client.client import connect

    found = connect().get("/v1/queues")["queues"]
    if as_json:
        print_json({"queues": found})
        return
    if not found:
        say("no queue was set up or is in use; 'pollux queues set NAME --weight 2 --quota 8' sets one up")
        return
    from rich.text import Text

    from pollux.cli.display.render import standard_output
    from pollux.cli.display.tables import plain_table

    table = plain_table("queue", "weight", "quota", "in use", "jobs", right=("weight", "quota", "in use", "jobs"))
    for queue in found:
        quota = "none" if queue["gpu_quota"] is None else str(queue["gpu_quota"])
        table.add_row(Text(str(queue["name"])), f"{queue['weight']:g}", quota, str(queue["used"]), str(queue["jobs"]))
    standard_output().print(table)


@app.command("set")
def set_queue(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_queues, help="The queue.")],
    weight: Annotated[
        float | None, typer.Option(metavar="W", parser=_WIDTH, help="Weight of each of its jobs; 1 by default.")
    ] = None,
    quota: Annotated[
        Any,
        typer.Option(metavar="N|none", parser=_quota, help="Most GPUs that its jobs may hold together; or none."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Set up a queue, or change its weight or quota; a value that is not given stays.

    Example: pollux queues set vision --weight 2 --quota 8
    """
    from urllib.parse import quote

    from pollux.cli.client.client import connect

    if weight is None and quota is None:
        raise InvalidInput(f"nothing to set for queue '{name}': give --weight, --quota or both")
    body: dict[str, Any] = {} if weight is None else {"weight": weight}
    if quota is not None:
        body["gpu_quota"] = None if quota == "none" else quota
    queue = connect().put(f"/v1/queues/{quote(name, safe='')}", body)
    if as_json:
        print_json(queue)
        return
    most = "no quota" if queue["gpu_quota"] is None else f"quota {queue['gpu_quota']}"
    say(f"{queue['name']}: weight {queue['weight']:g}, {most}; its jobs hold {queue['used']} GPUs")
