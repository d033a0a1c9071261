"""`pollux up` and `pollux down`: start and stop the service on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from pollux.cli.arguments.backend_options import option_words, preview, read_options
from pollux.cli.arguments.home import make_home
from pollux.cli.arguments.options import Json, complete_policies, print_json, real, whole
from pollux.cli.arguments.options import trigger as read_trigger
from pollux.cli.display.warnings_output import warning_lines
from pollux.cli.printing.visible import say
from pollux.core.errors import InvalidInput, PolluxError, UnknownName, Unreachable

if TYPE_CHECKING:
    from pollux.cli.client.client import Client
    from pollux.service.settings import ServiceSettings

__all__ = ["down", "greeting", "up"]

_START_SECONDS = 60.0
_POLL_SECONDS = 0.1
_ENGINE_SECONDS = 5.0
_INTERRUPTED = 130


def _at_stop(value: str) -> Literal["stop", "keep"]:
    if value in ("stop", "keep"):
        return "stop" if value == "stop" else "keep"
    raise UnknownName("--jobs", value, ("stop", "keep"))


def up(
    backend: Annotated[str, typer.Option(metavar="NAME", help="Where jobs run; see 'pollux backends'.")] = "local",
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="CPU slots instead of GPUs; by default one per core."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The Ray cluster's head; by default that of this machine."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the backend; may be given several times."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=complete_policies, help="Who gets GPUs; see 'pollux policies'."),
    ] = "castor",
    trigger: Annotated[
        Any, typer.Option(metavar="rounds|events", parser=read_trigger, help="Decide in rounds, or on changes.")
    ] = "events",
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", parser=real(lambda value: value > 0, "above 0"), help="Length of a round."),
    ] = 60.0,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; else 127.0.0.1, or the address at which nodes reach this machine.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", parser=whole(0), help="Port; 0 is any free one.")] = 7341,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for store, token and logs; else POLLUX_HOME.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate, for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    insecure_bind: Annotated[
        bool, typer.Option("--insecure-bind", help="Accept requests of other machines without encryption.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another host name that clients use for this service; may be given several times."
        ),
    ] = None,
    jobs: Annotated[
        Any,
        typer.Option(metavar="stop|keep", parser=_at_stop, help="What happens to running jobs when it stops."),
    ] = "stop",
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the backend would ask its engine for, and end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the service on this machine: scheduler and API.

    It runs until Ctrl-C or 'pollux down'. Example: pollux up --slots 4 --detach
    """
    from pollux.wire import home_layout

    folder = home_layout.home(os.environ if home is None else {"POLLUX_HOME": str(home)})
    _need_service_packages()
    _check_backend(backend)
    options = _backend_options(backend, slots, address, option or [])
    settings = _settings(
        home=folder,
        backend=backend,
        backend_options=options,
        policy=policy,
        trigger=trigger,
        interval_seconds=interval,
        host="127.0.0.1" if dry_run else _host(backend, options, host, insecure_bind or tls_cert is not None),
        port=port,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure_bind=insecure_bind,
        allowed_hosts=tuple(allow_host or ()),
        at_stop=jobs,
    )
    if dry_run:
        _print_preview(settings, as_json)
        return
    make_home(settings.home)
    if detach:
        _start_detached(settings, as_json)
        return
    from pollux.service import serve

    said = threading.Lock()
    try:
        serve(settings, on_ready=lambda _: _greet_later(settings, as_json, said))
    except (PolluxError, KeyboardInterrupt) as error:
        # Standard output has one JSON document; an error after it goes to standard error only.
        if not as_json or said.acquire(blocking=False):
            raise
        say(f"error: {' '.join(str(error).split()) or 'interrupted'}", err=True)
        raise typer.Exit(error.exit_code if isinstance(error, PolluxError) else _INTERRUPTED) from None


def _backend_options(backend: str, slots: int | None, address: str | None, words: list[str]) -> dict[str, Any]:
    words = words if address is None else [f"address={address}", *words]
    given = read_options(backend, words) if words else {}
    return given if slots is None else {**given, "slots": slots}


def _host(backend: str, options: dict[str, Any], host: str | None, may_be_seen: bool) -> str:
    """The address to listen on: the given one, or the one at which the backend's nodes reach this machine."""
    import pollux.backends as backends
    from pollux.backends.process.network import is_loopback

    head = None if host is not None else backends.head_of(backend, options)
    if head is None or is_loopback(head):
        return host or "127.0.0.1"
    if may_be_seen:
        return head
    raise InvalidInput(
        f"jobs on nodes of '{backend}' report to this machine at {head}, and tokens would travel in clear text: give "
        "--tls-cert and --tls-key, or --insecure-bind if you accept that; --option head=ADDRESS names another "
        "address, and --host 127.0.0.1 is for nodes that are all on this machine"
    )


def _print_preview(settings: ServiceSettings, as_json: bool) -> None:
    text = preview(settings.backend, settings.home, settings.backend_options)
    if as_json:
        print_json({"backend": settings.backend, "asks_for": text})
    else:
        say(text, nl=False)


def down(
    keep: Annotated[bool, typer.Option("--keep", help="Leave running jobs running; the next 'up' finds them.")] = False,
    as_json: Json = False,
) -> None:
    """Stop the service. Running jobs save and stop, and go on at the next 'pollux up'.

    Example: pollux down --keep
    """
    from pollux.cli.client.client import connect
    from pollux.cli.client.shutdown_wait import Ending

    client = connect()
    jobs = "keep" if keep else "stop"
    ending = Ending(client)
    answer = client.post("/v1/shutdown", {"jobs": jobs})
    ending.wait(float(answer.get("seconds", 0.0)), lambda line: None if as_json else say(line, err=True))
    if as_json:
        print_json({"url": client.url, "stopped": True, "jobs": jobs})
    else:
        say(f"stopped {client.url}; jobs {'run on' if keep else 'are stopped'}, 'pollux up' goes on with them")


def greeting(url: str, settings: ServiceSettings, status: dict[str, Any]) -> list[str]:
    """The text that a started service prints: address, token, nodes, and how to submit."""
    from pollux.wire import home_layout

    found = []
    warned = status["backend"] == "local" and status.get("warnings")
    why = "no GPU that can be used, see below" if warned else "no GPU found"
    why = "as asked with --slots" if "slots" in settings.backend_options else why
    for node in status["nodes"]:
        if node["gpu_type"] == "cpu":
            found.append(f"{node['gpus']} CPU slot{'s' * (node['gpus'] != 1)} ({why})")
        else:
            found.append(f"{node['gpus']} × {node['gpu_type']} on {node['id']}")
    return [
        f"pollux {status['version']} at {url}",
        f"  token     {home_layout.token_file(settings.home)}",
        f"  found     {', '.join(found) or 'no nodes yet'}",
        f"  policy    {status['policy']}, decides by {status['trigger']}; backend {status['backend']}",
        "  next      pollux submit job.yaml   or   pollux submit --gpus 1..2 -- python train.py",
        *(f"  {line}" for line in warning_lines(status)),
    ]


def _settings(**options: Any) -> ServiceSettings:
    import pollux.policies as policies
    from pollux.service.settings import ServiceSettings

    settings = ServiceSettings(**options)
    settings.check_bind()
    policies.summary(settings.policy)
    if settings.tls_cert is not None and settings.tls_key is not None:
        _check_certificate(settings.tls_cert, settings.tls_key)
    return settings


def _check_backend(name: str) -> None:
    import pollux.backends as backends

    missing = backends.available(name)
    if missing is not None:
        raise InvalidInput(f"backend '{name}' does not work here: {missing}")


def _check_certificate(cert: Path, key: Path) -> None:
    import ssl

    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not os.access(path, os.R_OK):
            raise InvalidInput(f"{option} is '{path}', which cannot be read; give a PEM file")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"--tls-cert '{cert}' and --tls-key '{key}' are no certificate with its key ({error}); give PEM files, "
            "the key without a password"
        ) from None


def _need_service_packages() -> None:
    import importlib.util

    absent = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if absent:
        raise InvalidInput(f"the service needs {' and '.join(absent)}: pip install 'pollux-scheduler[service]'")


def _greet_later(settings: ServiceSettings, as_json: bool, said: threading.Lock) -> None:
    """Print the greeting from another thread, since this thread answers the requests for it."""
    threading.Thread(target=_greet, args=(settings, as_json, said), daemon=True, name="pollux-greeting").start()


def _greet(settings: ServiceSettings, as_json: bool, said: threading.Lock) -> None:
    client = _own_client(settings.home)
    try:
        status = _first_status(client)
    except PolluxError as error:
        say(f"started, but does not answer: {error}", err=True)
        return
    if said.acquire(blocking=False):
        _print_started(client.url, settings, status, as_json)


def _first_status(client: Client) -> dict[str, Any]:
    """The service's status; waits a few seconds for the first node or warning."""
    deadline = time.monotonic() + _ENGINE_SECONDS
    status: dict[str, Any] = client.get("/v1/status")
    while not (status["nodes"] or status.get("warnings")) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        status = client.get("/v1/status")
    return status


def _print_started(url: str, settings: ServiceSettings, status: dict[str, Any], as_json: bool) -> None:
    from pollux.wire import home_layout

    if as_json:
        print_json({"url": url, "token_file": str(home_layout.token_file(settings.home)), "status": status})
    else:
        say("\n".join(greeting(url, settings, status)))
    sys.stdout.flush()


def _own_client(home: Path) -> Client:
    """A client for the service of this home, even if POLLUX_SERVER names another one."""
    from pollux.cli.client.client import connect

    return connect({"POLLUX_HOME": str(home)})


def _answers(client: Client) -> bool:
    try:
        client.get("/healthz")
    except Unreachable:
        return False
    return True


def _start_detached(settings: ServiceSettings, as_json: bool) -> None:
    """Start the same command in the background, and wait until it is ready or has failed."""
    from pollux.wire import home_layout

    log = home_layout.log_file(settings.home)
    before = _pid_of(home_layout.service_file(settings.home))
    with _opened(log) as output:
        start = output.tell()
        pid = _spawn([sys.executable, "-m", "pollux", "up", *_words(settings)], output.fileno())
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            raise _failed(os.waitstatus_to_exitcode(how), _last_line(log, start), log)
        if _pid_of(home_layout.service_file(settings.home)) not in (None, before):
            client = _own_client(settings.home)
            if _answers(client):
                _print_started(client.url, settings, _first_status(client), as_json)
                return
        time.sleep(_POLL_SECONDS)
    os.kill(pid, signal.SIGTERM)
    raise PolluxError(f"the service was not ready after {_START_SECONDS:.0f} s and was stopped; see {log}")


def _opened(log: Path) -> BinaryIO:
    try:
        # The log names jobs and people: only its owner may read it.
        return open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))
    except OSError as error:
        raise InvalidInput(f"{log} cannot be written ({error.strerror}): remove it, or set POLLUX_HOME") from None


def _failed(code: int, said: str, log: Path) -> PolluxError:
    """The error of a service that has ended, with the exit code that it has in the foreground."""
    error = PolluxError(said or f"the service ended at once; see {log}")
    error.exit_code = code if code > 0 else PolluxError.exit_code
    return error


def _spawn(words: list[str], output: int) -> int:
    """Start a process that outlives this one and writes to `output`; its id."""
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    # The service must not inherit blocked signals, since signals stop it.
    return os.posix_spawn(words[0], words, os.environ, file_actions=actions, setsid=True, setsigmask=())


def _words(settings: ServiceSettings) -> list[str]:
    """The command-line options for these settings."""
    words = ["--home", str(settings.home), "--backend", settings.backend, "--policy", settings.policy]
    words += ["--trigger", settings.trigger, "--interval", str(settings.interval_seconds)]
    words += ["--host", settings.host, "--port", str(settings.port), "--jobs", settings.at_stop]
    if "slots" in settings.backend_options:
        words += ["--slots", str(settings.backend_options["slots"])]
    words += option_words(settings.backend_options)
    words += [word for name in settings.allowed_hosts for word in ("--allow-host", name)]
    if settings.tls_cert is not None and settings.tls_key is not None:
        words += ["--tls-cert", str(settings.tls_cert), "--tls-key", str(settings.tls_key)]
    return [*words, "--insecure-bind"] if settings.insecure_bind else words


def _pid_of(service_file: Path) -> int | None:
    import json

    try:
        return int(json.loads(service_file.read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else ""
