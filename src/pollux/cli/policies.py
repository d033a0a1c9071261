"""`pollux policies`: which schedulers there are."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

__all__ = ["policies"]


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the scheduling policies: name, whether jobs adapt their batch, what it must know, what it is.

    Example: pollux policies --json
    """
    from pollux import policies as registry
    from pollux.cli.render import policies_table, print_table, standard_output

    entries: list[dict[str, Any]] = []
    for name in registry.names():
        policy = registry.create(name)
        entries.append(
            {
                "name": name,
                "summary": registry.summary(name),
                "batch": policy.batch,
                "needs": sorted(policy.needs),
                "options": sorted(registry.options(name)),
            }
        )
    if as_json:
        typer.echo(json.dumps({"policies": entries}, indent=2))
    else:
        print_table(standard_output(), policies_table(entries))
