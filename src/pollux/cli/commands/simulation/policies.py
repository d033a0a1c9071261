"""`pollux policies`: which schedulers there are, and where each runs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from pollux.cli.printing.visible import say

__all__ = ["policies"]

# A service can provide these needs; the controller refuses policies with others.
_KNOWN_TO_A_SERVICE = frozenset({"goodput", "remaining", "prior", "kind", "group", "deadline", "loss_history"})


def policies(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the scheduling policies, and where each of them runs: name, batch mode, needs and summary.

    Example: pollux policies --json
    """
    import pollux.policies as registry
    from pollux.cli.display.render import policies_table, print_table, standard_output

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
                "runs_in": ["service", "simulator"] if policy.needs <= _KNOWN_TO_A_SERVICE else ["simulator"],
            }
        )
    if as_json:
        say(json.dumps({"policies": entries}, indent=2))
    else:
        print_table(standard_output(), policies_table(entries))
