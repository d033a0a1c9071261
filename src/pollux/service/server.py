"""The service as a process: home, tokens, address, the engine behind the API, and an orderly end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pollux import __version__, backends, policies
from pollux.core.errors import Conflict, InvalidInput
from pollux.service.api import create_app
from pollux.service.engine import Engine
from pollux.service.guard import Guard
from pollux.service.settings import AtStop, ServiceSettings
from pollux.service.tokens import Tokens
from pollux.store import Store, open_store, open_telemetry
from pollux.wire.places import service_file, store_file, telemetry_file, token_file

if TYPE_CHECKING:
    import uvicorn

__all__ = [
    "Service",
    "announce",
    "build_engine",
    "listen",
    "operator_token",
    "prepare_home",
    "retract",
    "serve",
    "url_of",
]

_GRACEFUL_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Service:
    """A running service: where it is reached, and its engine."""

    url: str
    home: Path
    engine: Engine


def serve(settings: ServiceSettings, on_ready: Callable[[Service], None] | None = None) -> None:
    """Run until told to stop by SIGTERM, SIGINT or a request. `on_ready` is called once requests are answered."""
    settings.check_bind()
    prepare_home(settings.home)
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        settings = replace(settings, url=url_of(settings, listener))
        engine = build_engine(settings)
        try:
            engine.start()
            how = _answer(settings, engine, listener, on_ready)
        except BaseException:
            engine.stop("keep")
            raise
        engine.stop(how)


def build_engine(settings: ServiceSettings) -> Engine:
    """An engine with the store, backend and policy that the settings name; not started yet."""
    policy = policies.create(settings.policy, **settings.policy_options)
    kept = settings.store == "sqlite"
    store = open_store(store_file(settings.home) if kept else None)
    try:
        telemetry = open_telemetry(telemetry_file(settings.home) if kept else None)
        tokens = Tokens(operator_token(token_file(settings.home)), _secret(store))
        options = dict(settings.backend_options)
        if settings.backend == "local":
            options.setdefault("home", settings.home)
        backend = backends.create(settings.backend, **options)
        return Engine(policy, backend, store, telemetry, settings, tokens=tokens)
    except BaseException:
        store.close()
        raise


def prepare_home(home: Path) -> None:
    """Make the folder, for its owner only."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_mode & 0o077:
            home.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"home {home} cannot be used: {error.strerror}; give another with POLLUX_HOME") from error


def operator_token(path: Path) -> str:
    """The operator's token, made on first use; refuses one that others can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _known_token(path)
    except OSError as error:
        raise InvalidInput(f"token file {path} cannot be made: {error.strerror}; check its folder") from error
    token = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def _known_token(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"token file {path} cannot be read: {error}; remove it to get a new one") from error
    if mode & 0o077:
        raise InvalidInput(f"token file {path} has mode {mode:o}, so others can read it; remove it, and start again")
    if len(token) < 16:
        raise InvalidInput(f"token file {path} holds {len(token)} characters; remove it to get a new token")
    return token


def _secret(store: Store) -> str:
    """What job tokens are made with; kept beside the log."""
    known = store.setting("secret")
    if known is None:
        known = secrets.token_hex(32)
        store.set_setting("secret", known)
    return known


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address; one clear error where that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInput(f"address '{host}' is not known here: {error.strerror}; give one of this machine") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise Conflict(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "stop what is there, or choose another with --port (0: any free one)"
        ) from error
    return listener


def url_of(settings: ServiceSettings, listener: socket.socket) -> str:
    """The address under which the service is reached from this machine."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _answer(
    settings: ServiceSettings,
    engine: Engine,
    listener: socket.socket,
    on_ready: Callable[[Service], None] | None,
) -> AtStop:
    """Answer requests until told to stop; what shall become of the jobs."""
    import uvicorn

    asked: list[AtStop] = []

    def stop(jobs: AtStop) -> None:
        asked.append(jobs)
        server.should_exit = True

    app = create_app(engine, engine.tokens, (*settings.allowed_hosts, settings.host), stop)
    place = service_file(settings.home)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce(place, settings.url or "")
            if on_ready is not None:
                on_ready(Service(settings.url or "", settings.home, engine))

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            with _stopping_on_signals(lambda: setattr(self, "should_exit", True)):
                yield

    server = Server(_config(app, settings))
    try:
        server.run(sockets=[listener])
    finally:
        retract(place)
    return asked[0] if asked else settings.at_stop


def _config(app: Guard, settings: ServiceSettings) -> uvicorn.Config:
    import uvicorn

    return uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
        loop="asyncio",
        http="h11",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        timeout_keep_alive=75,
        ssl_certfile=None if settings.tls_cert is None else str(settings.tls_cert),
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
    )


@contextlib.contextmanager
def _stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT stop the service; only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def heard(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announce(place: Path, url: str) -> None:
    """Tell the command line where the service is."""
    found = {"url": url, "pid": os.getpid(), "started_at": time.time(), "version": __version__}
    new = place.with_name(f"{place.name}.new")
    new.write_text(json.dumps(found) + "\n", encoding="utf-8")
    new.replace(place)


def retract(place: Path) -> None:
    """Take that back, unless another service has announced itself since."""
    with contextlib.suppress(OSError, ValueError):
        if json.loads(place.read_text(encoding="utf-8")).get("pid") == os.getpid():
            place.unlink()
