"""The service as a process: home, tokens, address, the engine behind the API, and an orderly end."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pollux.backends as backends
import pollux.policies as policies
from pollux.backends.protocol import Backend
from pollux.core.errors import Conflict, InvalidInput, PolluxError
from pollux.core.version import __version__
from pollux.service.auth.tokens import Tokens
from pollux.service.deciding.process_policy import LONG_SECONDS
from pollux.service.engine.engine import Engine
from pollux.service.server.app import create_app
from pollux.service.server.certificates import host_for_nodes, host_to_announce, names_of, trusted_text
from pollux.service.server.peers import ConnectionLimits, raise_open_files
from pollux.service.server.service_log import bounded_log
from pollux.service.server.short_collections import short_collections
from pollux.service.settings import ANY_ADDRESS, AtStop, ServiceSettings
from pollux.storage.foreign_file import open_inside
from pollux.storage.state_file import create_state, read_json, write_state
from pollux.store import Store, open_store, open_telemetry
from pollux.wire.home_layout import ca_file, service_file, store_file, telemetry_file, token_file

__all__ = [
    "Service",
    "announce",
    "build_engine",
    "earlier_port",
    "listen",
    "listen_again",
    "operator_token",
    "prepare_home",
    "retract",
    "serve",
    "url_of",
]

_PLACE = "listened_at"
_VIEWER = "viewer-token"
# A name may have an address of a kind that this machine does not have, such as ::1 in most containers.
_NOT_OF_THIS_MACHINE = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL)
_MAX_TOKEN_BYTES = 4096
_log = logging.getLogger("pollux.service")


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
    port = earlier_port(settings)
    listener = listen_again(settings.host, port) if port and not settings.port else None
    listener = listener or listen(settings.host, settings.port)
    with contextlib.closing(listener), bounded_log():
        settings = _addressed(settings, listener)
        engine = build_engine(settings)
        settings = engine.settings
        try:
            _show_certificate(settings)
            engine.start()
            _keep_port(engine.store, settings.host, listener)
            with short_collections():
                _answer(settings, engine, listener, on_ready)
        except BaseException:
            engine.stop("keep")
            raise
        engine.stop()


def build_engine(settings: ServiceSettings) -> Engine:
    """An engine with the store, backend and policy that the settings name; not started yet."""
    policy = policies.create(settings.policy, **settings.policy_options)
    settings = replace(settings, long_decision_seconds=LONG_SECONDS)
    kept = settings.store == "sqlite"
    store = open_store(store_file(settings.home) if kept else None)
    try:
        telemetry = open_telemetry(telemetry_file(settings.home) if kept else None)
        token = token_file(settings.home)
        viewer = operator_token(token.with_name(_VIEWER))
        tokens = Tokens(operator_token(token), _secret(store), viewer)
        options = dict(settings.backend_options)
        if "home" in backends.options(settings.backend):
            options.setdefault("home", settings.home)
        backend = backends.create(settings.backend, **options)
        settings = _for_nodes(settings, backend)
        return Engine(policy, backend, store, telemetry, settings, tokens=tokens)
    except BaseException:
        store.close()
        raise


def prepare_home(home: Path) -> None:
    """Make the folder, for its owner only; refuses one that is open to others and is not ours."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(home.stat().st_mode)
        if not mode & 0o077:
            return
        if not _is_ours(home):
            raise InvalidInput(
                f"home {home} has mode {mode:o}, so others can read it, and holds files that are not Pollux's; "
                "give a new or empty folder with POLLUX_HOME, or 'chmod 700' this one if it is meant"
            )
        home.chmod(0o700)
    except OSError as error:
        raise InvalidInput(f"home {home} cannot be used: {error.strerror}; give another with POLLUX_HOME") from error


def _is_ours(home: Path) -> bool:
    """Whether a service used the folder before, or it is empty; a command may have begun a new service's log."""
    names = set(os.listdir(home)) - {"service.log", "lost+found"}
    return not names or bool(names & {_VIEWER, service_file(home).name, store_file(home).name})


def operator_token(path: Path) -> str:
    """A person's token, made on first use; refuses one that others can read."""
    with contextlib.suppress(OSError):
        if path.stat().st_size == 0:
            path.unlink()
            _log.warning("token file %s was empty, as after a full disk; a new token is made", path)
    if os.path.lexists(path):
        return _known_token(path)
    token = secrets.token_urlsafe(32)
    try:
        # The file appears whole or not at all: a process that is killed here leaves no unusable token.
        create_state(path, f"{token}\n".encode())
    except FileExistsError:
        return _known_token(path)
    except OSError as error:
        raise InvalidInput(f"token file {path} cannot be made: {error.strerror}; check its folder") from error
    return token


def _known_token(path: Path) -> str:
    try:
        with open_inside(path.parent, path.name) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, PolluxError, UnicodeDecodeError) as error:
        raise InvalidInput(f"token file {path} cannot be read: {error}; remove it to get a new one") from error
    if mode & 0o077:
        raise InvalidInput(f"token file {path} has mode {mode:o}, so others can read it; remove it, and start again")
    if len(token) < 16:
        raise InvalidInput(f"token file {path} holds {len(token)} characters; remove it to get a new token")
    return token


def _secret(store: Store) -> str:
    """The secret that job tokens are made with; it is in the store."""
    known = store.setting("secret")
    if known is None:
        known = secrets.token_hex(32)
        store.set_setting("secret", known)
    return known


def earlier_port(settings: ServiceSettings) -> int | None:
    """The port of the last service of this home at this address; None if it is unknown.

    Conflict, with its address and process, while that service still runs.
    """
    if settings.store != "sqlite":
        return None
    try:
        store = open_store(store_file(settings.home))
    except Conflict as error:
        found = _announced(service_file(settings.home))
        if found is None:
            raise
        raise Conflict(
            f"a service runs here already, at {found[0]} as process {found[1]}, for {settings.home}; "
            "use it, stop it with 'pollux down', or choose another folder with POLLUX_HOME or --home"
        ) from error
    with contextlib.closing(store):
        host, _, port = (store.setting(_PLACE) or "").rpartition(" ")
        is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
        return int(port) if host == settings.host and is_port else None


def _announced(place: Path) -> tuple[str, int] | None:
    found = read_json(place)
    try:
        return str(found["url"]), int(found["pid"])
    except (ValueError, LookupError, TypeError):
        return None


def _keep_port(store: Store, host: str, listener: socket.socket) -> None:
    """Keep the port for the next service, if any port will do: jobs that run on report there."""
    place = f"{host} {listener.getsockname()[1]}"
    if store.setting(_PLACE) != place:
        store.set_setting(_PLACE, place)


def listen_again(host: str, port: int) -> socket.socket | None:
    """A socket at an address that was used before; None if others have it now."""
    try:
        return listen(host, port)
    except Conflict:
        return None


def listen(host: str, port: int) -> socket.socket:
    """A socket at the first address of the host that this machine has; one clear error if that is not possible."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidInput(f"address '{host}' is not known here: {error.strerror}; give one of this machine") from error
    why = ""
    for family, kind, protocol, _, address in found:
        try:
            return _bound(family, kind, protocol, address)
        except OSError as error:
            if error.errno not in _NOT_OF_THIS_MACHINE:
                raise Conflict(
                    f"cannot listen on {host} port {port}: {error.strerror}; "
                    "stop what is there, or choose another with --port (0: any free one)"
                ) from error
            why = why or error.strerror or str(error)
    raise InvalidInput(f"cannot listen on {host}: {why}; give an address of this machine with --host")


def _bound(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(settings: ServiceSettings, listener: socket.socket) -> str:
    """The address under which the service is reached from this machine."""
    host, port = listener.getsockname()[:2]
    if settings.tls_cert is not None and settings.tls_key is not None:
        host = host_to_announce(settings.tls_cert, settings.tls_key, settings.host, host)
    elif host in ANY_ADDRESS:
        host = "127.0.0.1"
    return _url(settings, host, port)


def _url(settings: ServiceSettings, host: str, port: int) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _for_nodes(settings: ServiceSettings, backend: Backend) -> ServiceSettings:
    """The settings with what agents on other machines need: an address that reaches this machine, and whom to trust.

    A service that listens at one address is reached there; one that listens at all addresses, at the backend's `head`.
    """
    url, head = settings.url, backend.head
    if url is None or head is None:
        return settings
    if settings.tls_cert is not None and settings.tls_key is not None:
        settings = replace(settings, agents_ca=trusted_text(settings.tls_cert))
    if settings.host.strip("[]") in ANY_ADDRESS:
        host = head.strip("[]")
        if settings.tls_cert is not None and settings.tls_key is not None:
            host = host_for_nodes(settings.tls_cert, settings.tls_key, host)
        url = _url(settings, host, urlsplit(url).port or settings.port)
        settings = replace(settings, agents_url=url, allowed_hosts=(*settings.allowed_hosts, host))
    backend.reports_go_to(url)
    return settings


def _addressed(settings: ServiceSettings, listener: socket.socket) -> ServiceSettings:
    """The settings with the address; names that a certificate is made out to are names of the service.

    So is the machine's own name, if the service listens at all addresses.
    """
    names: tuple[str, ...] = (socket.gethostname(),) if settings.host.strip("[]") in ANY_ADDRESS else ()
    if settings.tls_cert is not None and settings.tls_key is not None:
        names = (*names, *names_of(settings.tls_cert, settings.tls_key))
    return replace(settings, url=url_of(settings, listener), allowed_hosts=(*settings.allowed_hosts, *names))


def _show_certificate(settings: ServiceSettings) -> None:
    """Let commands and agents on this machine trust the certificate, even if no authority signed it."""
    if settings.tls_cert is None:
        return
    place = ca_file(settings.home)
    try:
        write_state(place, settings.tls_cert.read_bytes(), durable=False)
    except OSError as error:
        raise InvalidInput(
            f"certificate '{settings.tls_cert}' cannot be copied to {place}: {error.strerror}; check both"
        ) from error


def _answer(
    settings: ServiceSettings,
    engine: Engine,
    listener: socket.socket,
    on_ready: Callable[[Service], None] | None,
) -> None:
    """Answer requests until told to stop, and then until all that must end has ended."""
    from pollux.service.server.http_server import HttpServer

    def stop(jobs: AtStop) -> None:
        if engine.stopping:
            return
        engine.loop.refuse_new_jobs()
        threading.Thread(target=wind_down, args=(jobs,), name="pollux-stopping", daemon=True).start()

    def wind_down(jobs: AtStop) -> None:
        # Requests are answered meanwhile: jobs that end report, and people want to see what is waited for.
        try:
            engine.loop.wind_down(jobs)
        finally:
            server.should_exit = True

    signals: list[bool] = []

    def signalled() -> None:
        # A second signal: stop without waiting for jobs.
        server.should_exit = bool(signals)
        signals.append(True)
        stop(settings.at_stop)

    def started() -> None:
        announce(place, settings.url or "")
        if on_ready is not None:
            on_ready(Service(settings.url or "", settings.home, engine))

    app = create_app(engine, engine.tokens, (*settings.allowed_hosts, settings.host), stop)
    place = service_file(settings.home)
    limits = ConnectionLimits.for_open_files(raise_open_files())
    server = HttpServer(app, settings, limits, started, signalled)
    try:
        server.run(sockets=[listener])
    finally:
        app.close()
        retract(place)


def announce(place: Path, url: str) -> None:
    """Tell the command line where the service is."""
    found = {"url": url, "pid": os.getpid(), "started_at": time.time(), "version": __version__}
    write_state(place, f"{json.dumps(found)}\n".encode(), durable=False)


def retract(place: Path) -> None:
    """Remove the announcement, unless another service has made one since."""
    found = read_json(place)
    if isinstance(found, dict) and found.get("pid") == os.getpid():
        with contextlib.suppress(OSError):
            place.unlink()
