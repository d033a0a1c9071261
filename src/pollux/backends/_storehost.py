"""The process that hosts the key-value store where the replicas of a generation meet, so that no replica has to."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable

from pollux.backends import _processes

__all__ = ["is_possible", "listen", "start"]


def is_possible() -> bool:
    """Whether PyTorch, whose store it is, is installed."""
    return importlib.util.find_spec("torch") is not None


def listen() -> tuple[int, int]:
    """A socket on the loopback that takes connections from now on, as a file number, and its port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = int(listener.getsockname()[1])
    return listener.detach(), port


def start(listener: int, port: int, warm: bool, let_go: Callable[[], None]) -> int:
    """Fork the host; replicas may connect at once and are answered when it is up. It ends with its parent."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _processes.die_with_parent(parent)
        let_go()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"
        if warm:
            _host(listener, port)
        else:
            os.set_inheritable(listener, True)
            os.execv(
                sys.executable, [sys.executable, "-P", "-m", "pollux.backends._storehost", str(listener), str(port)]
            )
    finally:
        os._exit(1)


def _host(listener: int, port: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    _host(int(sys.argv[1]), int(sys.argv[2]))
