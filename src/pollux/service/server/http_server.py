"""The server behind the API: uvicorn with our acceptor, our limits and our way to end."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from pollux.service.http.middleware import Guard
from pollux.service.server.connections import ConnectionAcceptor
from pollux.service.server.peers import ConnectionLimits, Peers
from pollux.service.server.service_log import LogFile
from pollux.service.settings import ServiceSettings
from pollux.wire.home_layout import log_file

__all__ = ["HttpServer"]

_GRACEFUL_SECONDS = 2
# uvicorn calls `on_tick` ten times a second.
_TICKS_BETWEEN_LOOKS = 10


class HttpServer(uvicorn.Server):
    """Answers requests. `started` is called once it does, `signalled` at SIGTERM and SIGINT in the main thread."""

    def __init__(
        self,
        app: Guard,
        settings: ServiceSettings,
        limits: ConnectionLimits,
        started: Callable[[], None],
        signalled: Callable[[], None],
    ) -> None:
        super().__init__(_config(app, settings, limits))
        self.peers = Peers(limits, app.refusals)
        self._limits = limits
        self._tell_started, self._signalled = started, signalled
        self._log_file = LogFile(log_file(settings.home))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and call `started`."""
        await super().startup(sockets=[])
        acceptors = [
            ConnectionAcceptor(each, self.config, self.server_state, self._limits, self.peers) for each in sockets or ()
        ]
        self.servers = acceptors  # type: ignore[assignment]
        self._tell_started()

    async def on_tick(self, counter: int) -> bool:
        """Once a second, look whether the log has grown too long."""
        if counter % _TICKS_BETWEEN_LOOKS == 0:
            self._log_file.shorten()
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have SIGTERM and SIGINT stop the service; only the main thread can receive signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def heard(number: int, frame: FrameType | None) -> None:
            self._signalled()

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _config(app: Guard, settings: ServiceSettings, limits: ConnectionLimits) -> uvicorn.Config:
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
        timeout_keep_alive=round(limits.keep_alive_seconds),
        ssl_certfile=None if settings.tls_cert is None else str(settings.tls_cert),
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
    )
