"""The process that hosts the key-value store where replicas meet, so that no replica has to; and the shim's line to it.

The store of a live job serves all its generations: the shim, which must not load PyTorch's threads, has the host set
keys and look for others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pollux.backends.process import proc
from pollux.backends.transport.json_lines import LineReader, line_of
from pollux.wire.live import keys
from pollux.wire.live.codec import MAX_VALUE_BYTES

__all__ = ["StoreHost", "is_possible", "listen", "start"]

_SEND_SECONDS = 5.0
_MAX_LINE_BYTES = 16 << 20


def is_possible() -> bool:
    """Whether PyTorch, whose store it is, is installed."""
    return importlib.util.find_spec("torch") is not None


def listen(head: str = "127.0.0.1") -> tuple[int, int]:
    """A socket at that address that takes connections from now on, as a file number, and its port."""
    listener = socket.create_server((head, 0), backlog=1024)
    port = int(listener.getsockname()[1])
    return listener.detach(), port


def start(
    listener: int, port: int, warm: bool, close_in_fork: Callable[[], None], control: int = -1, head: str = "127.0.0.1"
) -> int:
    """Fork the host; replicas may connect at once and are answered when it is up. It ends with its parent.

    `control` is its end of the line to the shim, -1 for none.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        proc.die_with_parent(parent)
        close_in_fork()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"
        if warm:
            _host(listener, port, control, head)
        else:
            kept = [fd for fd in (listener, control) if fd >= 0]
            for fd in kept:
                os.set_inheritable(fd, True)
            words = [*(str(number) for number in (listener, port, control)), head]
            os.execv(sys.executable, [sys.executable, "-P", "-m", "pollux.backends.shim.store_server", *words])
    finally:
        os._exit(1)


class StoreHost:
    """The host of one job's store, as its shim sees it. `pid` None: it has ended, and nothing is set or found."""

    def __init__(self, warm: bool, close_in_fork: Callable[[], None], head: str = "127.0.0.1") -> None:
        listener, self.port = listen(head)
        self.head = head
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, listener)
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)

            def alone() -> None:
                close_in_fork()
                ours.close()

            try:
                self.pid: int | None = start(listener, self.port, warm, alone, theirs.fileno(), head)
            except OSError:
                ours.close()
                raise
        ours.settimeout(_SEND_SECONDS)
        self.control = ours
        self._reader = LineReader(ours, _MAX_LINE_BYTES)

    @property
    def address(self) -> str:
        """Where replicas find it."""
        return f"{self.head}:{self.port}"

    def set(self, key: str, text: str) -> None:
        """Write a key of `pollux.wire.live.keys`."""
        self._send(op="set", key=key, value=text)

    def watch(self, name: str, keys: Iterable[str], seconds: float, repeat: bool = False) -> None:
        """Look for keys every so often, and tell each once, or whenever its value is another; none: look no more."""
        self._send(op="watch", name=name, keys=list(keys), seconds=seconds, repeat=repeat)

    def _send(self, **message: Any) -> None:
        if self.pid is not None:
            with contextlib.suppress(OSError):
                self.control.sendall(line_of(message))

    def found(self) -> list[tuple[str, str]] | None:
        """Keys and values that were found since the last time; None once the host is gone."""
        lines = self._reader.lines()
        return None if lines is None else [(key, text) for key, text in map(json.loads, lines)]

    def close(self) -> None:
        """End it."""
        self.control.close()
        if self.pid is not None:
            proc.kill_all([self.pid])
            self.pid = None


@dataclass(slots=True)
class _Watch:
    keys: list[str]
    seconds: float
    repeat: bool
    at: float = 0.0
    last: dict[str, bytes] = field(default_factory=dict)


class _Watcher:
    """The host's side of the line: sets keys, and polls the store only while something is watched for."""

    def __init__(self, store: Any, control: socket.socket) -> None:
        self._store = store
        self._control = control
        self._watches: dict[str, _Watch] = {}

    def run(self) -> None:
        reader = LineReader(self._control, _MAX_LINE_BYTES)
        while True:
            due = min((watch.at for watch in self._watches.values()), default=None)
            wait = None if due is None else max(0.0, due - time.monotonic())
            if select.select([self._control], [], [], wait)[0]:
                lines = reader.lines()
                if lines is None:
                    return
                for line in lines:
                    self._obey(json.loads(line))
            now = time.monotonic()
            for name, watch in [*self._watches.items()]:
                if watch.at <= now:
                    watch.at = now + watch.seconds
                    self._look(watch)
                    if not watch.keys:
                        del self._watches[name]

    def _obey(self, message: dict[str, Any]) -> None:
        if message["op"] == "set":
            self._store.set(_below(message["key"]), message["value"])
        elif message["op"] == "watch":
            self._watches.pop(message["name"], None)
            if message["keys"]:
                self._watches[message["name"]] = _Watch(message["keys"], message["seconds"], message["repeat"])

    def _look(self, watch: _Watch) -> None:
        for key in [*watch.keys]:
            if not self._store.check([_below(key)]):
                continue
            value = self._store.get(_below(key))
            if watch.last.get(key) == value:
                continue
            watch.last[key] = value
            if len(value) > MAX_VALUE_BYTES:
                print(f"the value of '{key}' has {len(value)} bytes, and is ignored", file=sys.stderr, flush=True)
                continue
            self._control.sendall(line_of([key, value.decode(errors="replace")]))
            if not watch.repeat:
                watch.keys.remove(key)


def _below(key: str) -> str:
    return f"{keys.PREFIX}/{key}"


def _host(listener: int, port: int, control: int, head: str) -> None:
    import torch.distributed as dist

    store = dist.TCPStore(head, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    if control >= 0:
        _Watcher(store, socket.socket(fileno=control)).run()
    while control < 0 and store is not None:
        signal.pause()


if __name__ == "__main__":
    _host(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
