"""`pollux history`: exports what the service has recorded, and imports it into an empty home."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from pollux.cli.arguments.home import make_home
from pollux.cli.arguments.options import Json, print_json
from pollux.cli.printing.visible import say
from pollux.core.errors import Conflict, InvalidInput, Unreachable

__all__ = ["app", "export", "history_lines", "import_"]

app = typer.Typer(
    help="Export and import what the service has recorded.",
    epilog="Example: pollux history export -o history.ndjson",
    invoke_without_command=True,
)


@app.callback()
def _history(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def export(
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; '-' is standard output.")
    ] = "-",
    as_json: Json = False,
) -> None:
    """Write everything that the service has recorded, one JSON value a line: facts, models and reports.

    The variables of jobs are in it, secrets too, so only its owner can read the file.
    Example: pollux history export -o history.ndjson
    """
    if as_json and output == "-":
        raise InvalidInput("--json tells about the file that was written: add --output FILE")
    lines = history_lines()
    if output == "-":
        # Bytes, since a history is UTF-8 even if the terminal is not.
        for line in lines:
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return
    from pollux.cli.arguments.output import staged_file

    count = 0
    with staged_file("--output", Path(output), private=True) as file:
        for line in lines:
            file.write(line.decode())
            count += 1
    if as_json:
        print_json({"file": output, "lines": count})
    else:
        say(f"{output}: {count} lines")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What 'pollux history export' wrote.")],
    as_json: Json = False,
) -> None:
    """Bring a history into an empty home, with the service down; the next 'pollux up' goes on from it.

    Example: POLLUX_HOME=~/restored pollux history import history.ndjson
    """
    from pollux.store import open_store, open_telemetry
    from pollux.store.history import import_into
    from pollux.wire import home_layout

    home = home_layout.home(os.environ)
    try:
        stream = file.open("rb")
    except OSError as error:
        raise InvalidInput(
            f"{file} cannot be read ({error.strerror}); give a file of 'pollux history export'"
        ) from None
    with stream:
        make_home(home)
        store = open_store(home_layout.store_file(home))
        try:
            if store.revision:
                raise Conflict(f"{home} has a history already; set POLLUX_HOME to an empty folder")
            telemetry = open_telemetry(home_layout.telemetry_file(home))
            try:
                import_into(stream, store, telemetry)
            finally:
                telemetry.close()
            revision = store.revision
        finally:
            store.close()
    if as_json:
        print_json({"home": str(home), "facts": revision})
    else:
        say(f"{home}: {revision} facts; 'pollux up' goes on from there")


def history_lines() -> Iterable[bytes]:
    """The lines of the history, from the service or, if none runs, from the store in the home folder."""
    from pollux.cli.client.client import connect
    from pollux.wire import home_layout

    home = home_layout.home(os.environ)
    try:
        client = connect()
        client.get("/readyz")
    except Unreachable:
        if os.environ.get("POLLUX_SERVER") or not home_layout.store_file(home).exists():
            raise
        return _stored(home)
    return client.lines("/v1/history")


def _stored(home: Path) -> Iterable[bytes]:
    from pollux.store import open_store, open_telemetry
    from pollux.store.history import export as export_store
    from pollux.wire import home_layout

    store: Any = open_store(home_layout.store_file(home))
    try:
        telemetry: Any = open_telemetry(home_layout.telemetry_file(home))
        try:
            yield from export_store(store, telemetry)
        finally:
            telemetry.close()
    finally:
        store.close()
