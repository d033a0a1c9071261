"""`pollux nodes`: lists nodes, sets them aside and takes them back."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pollux.cli.arguments.options import Json, print_json
from pollux.cli.printing.visible import say

__all__ = ["app", "nodes", "set_aside", "take_back"]

_Node = Annotated[str, typer.Argument(metavar="NODE", help="The node, by the name that 'pollux nodes' shows.")]

app = typer.Typer(invoke_without_command=True, epilog="Example: pollux nodes take-back node-3")


@app.callback()
def nodes(ctx: typer.Context, as_json: Json = False) -> None:
    """List nodes: GPUs, type, GPUs in use, jobs; and which are set aside, and why.

    Pollux sets a node aside by itself when different jobs fail there again and again, or one that runs elsewhere.
    """
    if ctx.invoked_subcommand is not None:
        return
    from pollux.cli.client.client import connect

    found = connect().get("/v1/cluster")["nodes"]
    if as_json:
        print_json({"nodes": found})
        return
    if not found:
        say("the service has no nodes now")
        return
    from pollux.cli.display.render import standard_output
    from pollux.cli.display.tables import nodes_table

    standard_output().print(nodes_table(found))
    for node in found:
        if node.get("set_aside"):
            say(f"{node['id']} is set aside: {node['set_aside']}; 'pollux nodes take-back {node['id']}' ends that")


@app.command("set-aside")
def set_aside(
    node: _Node,
    why: Annotated[str, typer.Option(metavar="TEXT", help="What others are told.")] = "",
    as_json: Json = False,
) -> None:
    """Place nothing new on a node; what runs there stays until it ends or moves.

    Example: pollux nodes set-aside node-3 --why "its fan is broken"
    """
    _change(node, "set-aside", {"why": why} if why else {}, as_json)


@app.command("take-back")
def take_back(node: _Node, as_json: Json = False) -> None:
    """Use a node again that was set aside, by Pollux or by an operator.

    Example: pollux nodes take-back node-3
    """
    _change(node, "take-back", None, as_json)


def _change(node: str, what: str, body: dict[str, Any] | None, as_json: bool) -> None:
    from urllib.parse import quote

    from pollux.cli.client.client import connect

    found = connect().post(f"/v1/nodes/{quote(node, safe='')}/{what}", body)
    if as_json:
        print_json(found)
        return
    say(f"{found['id']}: " + (f"set aside: {found['set_aside']}" if found["set_aside"] else "used again"))
