"""Connects to Ray, and runs until its input ends."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pollux.backends.ray.driver.loop import Driver
from pollux.backends.ray.driver.ray_errors import connection_error
from pollux.backends.ray.driver_messages import (
    MAX_LINE_BYTES,
    ConnectedMessage,
    DriverMessage,
    DriverRequest,
    UnreachableMessage,
    decode_request,
    encode_line,
)
from pollux.backends.transport.json_lines import LineReader
from pollux.wire.live.codec import MalformedValue

__all__ = ["listen", "main", "requests_of"]

_CONNECT_CODE = 3
_REACH_SECONDS = 10.0
# Shorter than the service waits for the driver's end.
_LAST_SECONDS = 4.0


def main() -> None:
    """Connect, and work until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    # Ray's own output must not get between the lines.
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(message: DriverMessage) -> None:
        with lock:
            output.write(encode_line(message))
            output.flush()

    requests = requests_of(0)
    order = next(requests, None)
    if order is None:
        return
    ray: Any = importlib.import_module("ray")
    try:
        _check_port(order.address)
        ray.init(
            address=order.address, namespace=order.namespace, log_to_driver=False, logging_level="ERROR",
            configure_logging=False,
        )  # fmt: skip
    except Exception as error:
        tell(UnreachableMessage(connection_error(error)))
        sys.exit(_CONNECT_CODE)
    tell(ConnectedMessage(str(ray.__version__)))
    driver = Driver(ray, order, tell)
    threading.Thread(target=listen, args=(driver, requests), daemon=True).start()
    driver.run()


def _check_port(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS):
            pass


class _Input:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def recv(self, size: int) -> bytes:
        return os.read(self._descriptor, size)


def requests_of(descriptor: int) -> Iterator[Any]:
    """The order and the requests that come over a pipe, until its end."""
    reader = LineReader(_Input(descriptor), MAX_LINE_BYTES)
    while (lines := reader.lines()) is not None:
        yield from map(decode_request, lines)


def listen(driver: Driver, requests: Iterable[DriverRequest]) -> None:
    """Hand each request to the driver's thread; the process ends after the last one."""
    code = 0
    try:
        for request in requests:
            driver.events.put((driver.obey, (request,)))
    except MalformedValue as error:
        print(f"a request of the service is refused: {error}", file=sys.stderr, flush=True)
        code = 1
    # The service has ended: carry out its last orders, and do not wait for Ray's own shutdown, which may take long.
    driver.events.put((os._exit, (code,)))
    time.sleep(_LAST_SECONDS)
    os._exit(code)


if __name__ == "__main__":
    main()
