"""`pollux run`: one job on this machine, scheduled by the same engine as a service's, which keeps nothing."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.options import Json, complete_policies, print_json, whole
from pollux.core.errors import Conflict, InvalidInput

if TYPE_CHECKING:
    from pollux.cli.run_screen import Screen
    from pollux.service import Engine
    from pollux.wire.job import JobRequest

__all__ = ["app", "run"]

_POLL_SECONDS = 0.2
_INTERRUPTED = 130

app = typer.Typer()


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]", help="A Python script, or any command, and its arguments."),
    ],
    gpus: Annotated[
        str, typer.Option(metavar="RANGE", help="From least to most GPUs, such as 1..4, or one number.")
    ] = "1",
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="CPU slots instead of GPUs; by default one per core."),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name; by default the script's.")] = None,
    policy: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=complete_policies, help="Who gets GPUs; see 'pollux policies'."),
    ] = "pollux",
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="A variable; may be repeated.")
    ] = None,
    retries: Annotated[
        int, typer.Option(metavar="N", parser=whole(0), help="How often a crash is followed by another try.")
    ] = 0,
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep checkpoints and logs here, and go on from them; else nothing is kept."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one job on this machine, without a service: it gets GPUs, batch and learning rate as under one.

    Its output is shown; Ctrl-C lets it save and ends it, twice kills it. Ends with 0 if the job did, else with 1.
    Example: pollux run --gpus 1..4 train.py --epochs 10
    """
    from pollux.cli.run_screen import Screen
    from pollux.cli.submit import requests_from, variables_from

    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    changes: dict[str, Any] = {"gpus": gpus, "retries": retries, "grace": "30s", **({"name": name} if name else {})}
    request = requests_from([], words, changes, variables_from(env or []))[0]
    with ExitStack() as stack:
        folder = stack.enter_context(_home(home))
        engine = stack.enter_context(_engine(folder.path, slots, policy))
        screen = stack.enter_context(Screen(to_stderr=as_json))
        status, interrupted = _follow(engine, request, screen)
        folder.keep = home is not None or status["state"] == "failed"
    if as_json:
        print_json({"job": status})
    else:
        _say_end(status, folder.path if folder.keep else None)
    if interrupted:
        raise typer.Exit(_INTERRUPTED)
    if status["state"] != "succeeded":
        raise typer.Exit(1)


@dataclass(slots=True)
class _Folder:
    path: Path
    keep: bool = False


@contextmanager
def _home(named: Path | None) -> Iterator[_Folder]:
    """The folder for checkpoints and logs: the named one, or a new one that goes away unless it is to be kept."""
    if named is not None:
        path = named.expanduser().absolute()
        _refuse_service_home(path)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield _Folder(path, keep=True)
        return
    folder = _Folder(Path(tempfile.mkdtemp(prefix="pollux-run-")))
    try:
        yield folder
    finally:
        if not folder.keep:
            shutil.rmtree(folder.path, ignore_errors=True)


def _refuse_service_home(path: Path) -> None:
    from pollux.wire import places

    if places.service_file(path).exists():
        raise Conflict(f"--home is '{path}', where a service runs: use 'pollux submit', or give another folder")


@contextmanager
def _engine(home: Path, slots: int | None, policy: str) -> Iterator[Engine]:
    """An engine with the local backend that remembers nothing, and a desk for the agent's reports."""
    from pollux import backends, policies
    from pollux.cli.report_desk import open_desk
    from pollux.service import Engine
    from pollux.service.settings import ServiceSettings
    from pollux.store import open_store, open_telemetry

    options = {} if slots is None else {"slots": slots}
    with open_desk() as desk:
        settings = ServiceSettings(
            home=home,
            policy=policy,
            backend_options=options,
            store="memory",
            url=desk.url,
            min_gap_seconds=0.2,
            report_every_seconds=5.0,
        )
        backend = backends.create("local", home=home, **options)
        engine = Engine(policies.create(policy), backend, open_store(None), open_telemetry(None), settings)
        desk.engine = engine
        engine.start()
        try:
            yield engine
        finally:
            engine.stop("stop")


def _follow(engine: Engine, request: JobRequest, screen: Screen) -> tuple[dict[str, Any], bool]:
    """Submit, show what it writes and how it stands until it has ended; and whether Ctrl-C was pressed."""
    from pollux.wire.codec import encode

    total = sum(node.gpus for node in engine.status().nodes)
    if request.min_gpus > total:
        raise InvalidInput(f"--gpus asks for at least {request.min_gpus}, and {total} are here; give fewer, or --slots")
    job = engine.submit(request)[0].id
    offset, handled = 0, 0
    with _counted_interrupts() as presses:
        while True:
            status: dict[str, Any] = encode(engine.job(job))
            offset = _show_log(engine, job, offset, screen)
            screen.status(status, time.time())
            if status["ended_at"] is not None and not _has_processes(engine, job):
                _show_log(engine, job, offset, screen)
                return status, bool(presses)
            if len(presses) > handled:
                handled = len(presses)
                _interrupt(engine, job, handled, screen)
            time.sleep(_POLL_SECONDS)


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C adds to the list, and interrupts nothing: output would be lost or shown twice."""
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)


def _has_processes(engine: Engine, job: str) -> bool:
    """Whether replicas are there still: a cancelled job has ended for the engine while it saves."""
    return any(entry.job_id == job and entry.state != "ended" for entry in engine.backend.running())


def _interrupt(engine: Engine, job: str, presses: int, screen: Screen) -> None:
    from pollux.controller import ENDED

    status = engine.job(job)
    if presses == 1 and status.state not in ENDED:
        screen.note("stopping; it has 30 s to save, Ctrl-C again kills it")
        engine.cancel(job)
    elif presses > 1:
        engine.backend.stop(job, status.generation, 0.0)


def _show_log(engine: Engine, job: str, offset: int, screen: Screen) -> int:
    while True:
        chunk = engine.logs(job, 0, offset)
        if chunk.text:
            screen.log(chunk.text)
        offset = chunk.offset
        if chunk.at_end:
            return offset


def _say_end(status: dict[str, Any], kept: Path | None) -> None:
    from pollux.cli.figures import duration

    took = duration((status["ended_at"] or 0) - status["submitted_at"])
    detail = f": {status['detail']}" if status["detail"] and status["state"] != "succeeded" else ""
    typer.echo(f"{status['id']}: {status['state']} after {took}, {status['restarts']} re-allocations{detail}", err=True)
    if kept is not None:
        typer.echo(f"logs and checkpoints: {kept}{os.sep}", err=True)
