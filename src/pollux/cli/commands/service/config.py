"""`pollux config`: the settings in force, and where each comes from. There is no settings file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pollux.cli.arguments.options import Json, print_json
from pollux.cli.printing.visible import say

__all__ = ["config", "settings_in_force"]

_TIMEOUT_SECONDS = 5.0


def config(as_json: Json = False) -> None:
    """Show the settings in force and where each comes from: the environment, the running service, or a default.

    Example: POLLUX_HOME=~/lab pollux config
    """
    entries = list(settings_in_force(os.environ))
    if as_json:
        print_json({"settings": entries})
        return
    for entry in entries:
        say(f"{entry['name']:<17} {entry['value']}   (from: {entry['source']})")
        say(f"{'':<17} {entry['meaning']}")


def settings_in_force(environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Every setting: name, value (a token's is not shown), source and meaning."""
    from pollux.wire import home_layout
    from pollux.wire.environment import USER_VARIABLES

    home = home_layout.home(environ)
    server, server_source = _server(environ, home)
    token = home_layout.token_file(home)
    values = {
        "POLLUX_HOME": (str(home), "environment" if environ.get("POLLUX_HOME") else "default"),
        "POLLUX_SERVER": (server, server_source),
        "POLLUX_TOKEN": ("set", "environment")
        if environ.get("POLLUX_TOKEN")
        else (("set", str(token)) if token.exists() else ("none", "default")),
    }
    for name, meaning in USER_VARIABLES.items():
        value, source = values.get(name, (environ.get(name, ""), "environment" if name in environ else "default"))
        yield {"name": name, "value": value, "source": source, "meaning": meaning}
    told = {} if server == "none" else _service_settings(environ)
    for name, value, meaning in _up_defaults():
        source = "the running service" if name in told else "default"
        yield {"name": name, "value": told.get(name, value), "source": source, "meaning": meaning}


def _service_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of the running service, by name; empty if it does not answer."""
    from urllib.parse import urlsplit

    from pollux.cli.client.client import connect
    from pollux.core.errors import PolluxError

    try:
        client = connect(environ, timeout=_TIMEOUT_SECONDS)
        status = client.get("/v1/status")
    except PolluxError:
        return {}
    place = urlsplit(client.url)
    told = {name: status.get(name) for name in ("backend", "policy", "trigger", "interval_seconds", "at_stop")}
    told |= {"host": place.hostname, "port": place.port}
    return {name: value for name, value in told.items() if value not in (None, "")}


def _server(environ: Mapping[str, str], home: Any) -> tuple[str, str]:
    from pollux.cli.client.client import find_service
    from pollux.core.errors import Unreachable
    from pollux.wire import home_layout

    if environ.get("POLLUX_SERVER"):
        return environ["POLLUX_SERVER"], "environment"
    try:
        return find_service(environ, home), str(home_layout.service_file(home))
    except Unreachable:
        return "none", "no service runs here"


def _up_defaults() -> Iterator[tuple[str, Any, str]]:
    """The defaults of `pollux up`."""
    from dataclasses import fields

    from pollux.service.settings import ServiceSettings

    meanings = {
        "backend": "where jobs run (up --backend)",
        "policy": "who gets GPUs (up --policy)",
        "trigger": "when to decide (up --trigger)",
        "interval_seconds": "seconds between two rounds (up --interval)",
        "host": "address to listen on (up --host)",
        "port": "port to listen on (up --port)",
        "at_stop": "what happens to jobs when the service stops (up --jobs)",
    }
    defaults = {field.name: field.default for field in fields(ServiceSettings)}
    for name, meaning in meanings.items():
        yield name, defaults[name], meaning
