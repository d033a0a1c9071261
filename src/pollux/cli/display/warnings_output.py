"""The warnings of a service, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pollux.cli.printing.visible import say
from pollux.core.errors import PolluxError

if TYPE_CHECKING:
    from pollux.cli.client.client import Client

__all__ = ["WAITING", "print_warnings", "warning_lines"]

WAITING = ("queued", "starting")
"""States in which a job may wait for something that a warning is about."""

_MOST = 8


def warning_lines(status: Mapping[str, Any]) -> list[str]:
    """The warnings of a service's status, a line each; of more than eight, the number of the rest."""
    found = [f"warning: {text}" for text in status.get("warnings") or ()]
    if len(found) <= _MOST:
        return found
    return [*found[: _MOST - 1], f"warning: and {len(found) - _MOST + 1} more; 'pollux top --json' has all"]


def print_warnings(client: Client) -> None:
    """Print the service's warnings on standard error, if there are any and the service answers."""
    try:
        lines = warning_lines(client.get("/v1/status"))
    except PolluxError:
        return
    for line in lines:
        say(line, err=True)
