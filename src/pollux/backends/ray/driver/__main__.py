"""Connects to Ray, and runs until its input ends: orders and reports are lines of JSON."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from pollux.backends.ray.driver.loop import Driver
from pollux.backends.ray.driver.ray_errors import connection_error
from pollux.backends.ray.driver_order import DriverOrder

__all__ = ["listen", "main"]

_CONNECT_CODE = 3
_REACH_SECONDS = 10.0
# Shorter than the service waits for the driver's end.
_LAST_SECONDS = 4.0


def main() -> None:
    """Connect, and work until the input ends."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Ray's own output must not get between the lines.
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(kind: str, **more: Any) -> None:
        with lock:
            output.write(json.dumps({"kind": kind, **more}) + "\n")
            output.flush()

    order = DriverOrder(**json.loads(sys.stdin.readline()))
    ray: Any = importlib.import_module("ray")
    try:
        _check_port(order.address)
        ray.init(
            address=order.address, namespace=order.namespace, log_to_driver=False, logging_level="ERROR",
            configure_logging=False,
        )  # fmt: skip
    except Exception as error:
        tell("unreachable", why=connection_error(error))
        sys.exit(_CONNECT_CODE)
    tell("connected", version=str(ray.__version__))
    driver = Driver(ray, order, tell)
    threading.Thread(target=listen, args=(driver,), daemon=True).start()
    driver.run()


def _check_port(address: str) -> None:
    """Fail at once where nothing listens; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS):
            pass


def listen(driver: Driver) -> None:
    """Hand each line of the input to the driver's thread; the process ends after the last one."""
    for line in sys.stdin:
        driver.events.put((driver.obey, (json.loads(line),)))
    # The service has ended: carry out its last orders, and do not wait for Ray's own shutdown, which may take long.
    driver.events.put((os._exit, (0,)))
    time.sleep(_LAST_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    main()
