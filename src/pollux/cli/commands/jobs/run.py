"""`pollux run`: one job on this machine, with the service's engine and a store in memory."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.arguments.home import make_home
from pollux.cli.arguments.options import Json, complete_policies, print_json, whole
from pollux.cli.printing.visible import say
from pollux.core.errors import Conflict, InvalidInput, PolluxError

if TYPE_CHECKING:
    from pollux.cli.display.run_screen import Screen
    from pollux.service import Engine
    from pollux.wire.job import JobRequest

__all__ = ["app", "run"]

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 30
# If this command is killed, the job's shim ends the job after this time.
_ORPHAN_SECONDS = 5.0
# Sent by Ctrl-C, by `timeout` or a shutdown, and by a terminal that closes.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALLED = 128
# The most that is read before signals and status are checked again.
_PIECES_AT_ONCE = 16

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
    ] = "castor",
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="A variable; may be repeated.")
    ] = None,
    retries: Annotated[
        int, typer.Option(metavar="N", parser=whole(0), help="How often the job is started again after a crash.")
    ] = 0,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep checkpoints and logs here, and go on from them; else they are kept only if the job fails, or is "
            "stopped after it has saved something.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run one job on this machine, without a service: it gets GPUs, batch and learning rate as under one.

    Its output is shown. Ctrl-C, SIGTERM and SIGHUP let it save and end it, and so does, some seconds later, a 'kill -9'
    of this command; Ctrl-C twice kills it. Ends with 0 if the job did, else with 1.

    Example: pollux run --gpus 1..4 train.py --epochs 10
    """
    from pollux.cli.commands.jobs.submit import requests_from, variables_from
    from pollux.cli.display.run_screen import Screen

    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    changes: dict[str, Any] = {
        "gpus": gpus,
        "retries": retries,
        "grace": f"{_GRACE_SECONDS}s",
        **({"name": name} if name else {}),
    }
    request = requests_from([], words, changes, variables_from(env or []))[0]
    with ExitStack() as stack:
        stack.enter_context(_unwinding())
        folder = stack.enter_context(_home(home))
        engine = stack.enter_context(_engine(folder.path, slots, policy))
        screen = stack.enter_context(Screen(to_stderr=as_json))
        status, stopped_by = _follow(engine, request, screen)
        if home is None and status["state"] in ("failed", "succeeded"):
            folder.keep = status["state"] == "failed"
    # The terminal may be closed by now.
    with suppress(OSError) if stopped_by else ExitStack():
        if as_json:
            print_json({"job": status})
        else:
            _print_end(status)
        if folder.is_kept:
            _print_kept(folder.path, named=home is not None, stopped=stopped_by is not None)
    if stopped_by is not None:
        raise typer.Exit(_SIGNALLED + stopped_by)
    if status["state"] != "succeeded":
        raise typer.Exit(1)


@dataclass(slots=True)
class _Folder:
    """`keep` is None if the folder is kept only when the job has saved something."""

    path: Path
    keep: bool | None = None

    @property
    def is_kept(self) -> bool:
        if self.keep is None:
            return any(path.is_file() for path in (self.path / "checkpoints").rglob("*"))
        return self.keep


@contextmanager
def _home(named: Path | None) -> Iterator[_Folder]:
    """The folder for checkpoints and logs: the named one, or a new one that is removed unless it is to be kept."""
    if named is not None:
        path = named.expanduser().absolute()
        make_home(path, "--home")
        _refuse_service_home(path)
        yield _Folder(path, keep=True)
        return
    folder = _Folder(Path(tempfile.mkdtemp(prefix="pollux-run-")))
    try:
        yield folder
    finally:
        if not folder.is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


def _refuse_service_home(path: Path) -> None:
    from pollux.wire import home_layout

    # Even if that service is down: its jobs may still run, and this engine would end them as unknown.
    if home_layout.service_file(path).exists() or home_layout.store_file(path).exists():
        raise Conflict(f"--home is '{path}', the folder of a service: use 'pollux submit', or give another folder")


@contextmanager
def _engine(home: Path, slots: int | None, policy: str) -> Iterator[Engine]:
    """An engine with the local backend and a store in memory, and a server for the agent's reports."""
    import pollux.backends as backends
    import pollux.policies as policies
    from pollux.cli.client.report_server import open_report_server
    from pollux.service import Engine
    from pollux.service.server.service_log import bounded_log
    from pollux.service.settings import ServiceSettings
    from pollux.store import open_store, open_telemetry

    options = {} if slots is None else {"slots": slots}
    with bounded_log(), open_report_server() as reports:
        settings = ServiceSettings(
            home=home,
            policy=policy,
            backend_options=options,
            store="memory",
            url=reports.url,
            min_gap_seconds=0.2,
            report_every_seconds=5.0,
        )
        backend = backends.create("local", home=home, orphan_seconds=_ORPHAN_SECONDS, **options)
        engine = Engine(policies.create(policy), backend, open_store(None), open_telemetry(None), settings)
        reports.engine = engine
        engine.start()
        try:
            yield engine
        finally:
            engine.stop("stop")


def _follow(engine: Engine, request: JobRequest, screen: Screen) -> tuple[dict[str, Any], int | None]:
    """Submit the job, show its output and state until it has ended; the signal that ended it, if any."""
    from pollux.wire.codec import encode

    total = sum(node.gpus for node in engine.status().result().nodes)
    if request.min_gpus > total:
        raise InvalidInput(f"--gpus asks for at least {request.min_gpus}, and {total} are here; give fewer, or --slots")
    # A folder that was used before has the log of the last run.
    offset, handled = _log_end(engine, request.name), 0
    job = engine.submit(request).result()[0].id
    with _noted_signals() as signals:
        while True:
            status: dict[str, Any] = encode(engine.job(job))
            # Checked before the log is read, since an ended job writes no more.
            over = status["ended_at"] is not None and not _has_processes(engine, job)
            offset, more = _show_log(engine, job, offset, screen)
            screen.status(status, time.time())
            new = signals[handled:]
            for number in new:
                _interrupt(engine, job, number, handled == 0, screen)
                handled += 1
            # After a second Ctrl-C, the rest of the output is not printed.
            if over and (new or not more):
                return status, signals[0] if signals else None
            if not more:
                time.sleep(_POLL_SECONDS)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect signals in a list: as exceptions they would lose or repeat output."""
    noted: list[int] = []
    with _handled(_ENDING, lambda number, _: noted.append(number)):
        yield noted


@contextmanager
def _unwinding() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end this process like Ctrl-C, so that `finally` blocks run."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(_SIGNALLED + number)

    with _handled(_ENDING[1:], leave):
        yield


@contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, Any], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in numbers}
    # A signal that `nohup` has set to be ignored stays ignored; Ctrl-C, which a shell ignores after `&`, does not.
    chosen = [number for number in numbers if number == signal.SIGINT or before[number] != signal.SIG_IGN]
    for number in chosen:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in chosen:
            signal.signal(number, before[number])


def _has_processes(engine: Engine, job: str) -> bool:
    """Whether replicas still run; for the engine, a job that was cancelled and still saves has ended."""
    return any(entry.job_id == job and entry.state != "ended" for entry in engine.backend.running())


def _interrupt(engine: Engine, job: str, number: int, first: bool, screen: Screen) -> None:
    """Cancel the job so that it saves; a second Ctrl-C kills it. Other signals, which often come twice, do not."""
    from pollux.controller import ENDED

    status = engine.job(job)
    screen.may_be_gone = True
    if first and status.state not in ENDED:
        again = " again" * (number == signal.SIGINT)
        screen.note(f"stopping; it has {_GRACE_SECONDS} s to save, Ctrl-C{again} kills it")
        engine.cancel(job).result()
    elif not first and number == signal.SIGINT:
        engine.backend.stop(job, status.generation, 0.0)


def _log_end(engine: Engine, job: str) -> int:
    with suppress(PolluxError):
        return engine.backend.logs(job, 0, -1, 1).offset
    return 0


def _show_log(engine: Engine, job: str, offset: int, screen: Screen) -> tuple[int, bool]:
    """Show a piece of the log from `offset` on; the offset after it, and whether there is more."""
    for _ in range(_PIECES_AT_ONCE):
        chunk = engine.logs(job, 0, offset)
        if chunk.text:
            screen.log(chunk.text)
        offset = chunk.offset
        # A file that cannot be read now gives an empty piece that is not the end.
        if chunk.at_end or not chunk.text:
            return offset, False
    return offset, True


def _print_end(status: dict[str, Any]) -> None:
    from pollux.cli.display.number_format import duration

    took = duration((status["ended_at"] or 0) - status["submitted_at"])
    detail = f": {status['detail']}" if status["detail"] and status["state"] != "succeeded" else ""
    say(f"{status['id']}: {status['state']} after {took}, {status['restarts']} re-allocations{detail}", err=True)


def _print_kept(path: Path, named: bool, stopped: bool) -> None:
    say(f"logs and checkpoints: {path}{os.sep}", err=True)
    if stopped and not named:
        say(f"'pollux run --home {path}' with the same script goes on from there", err=True)
