"""The process that hosts the key-value store where replicas meet, so that no replica has to; and the shim's line to it.

The store of a live job serves all its generations: the shim has the host write keys and watch others. `peers` decides
who may use the store. The host needs no PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import resource
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pollux.backends.process import proc
from pollux.backends.shim.store.host_messages import (
    MAX_LINE_BYTES,
    FoundMessage,
    SetRequest,
    WatchRequest,
    decode_found,
    decode_request,
    encode_line,
)
from pollux.backends.shim.store.key_values import StoreRefusal
from pollux.backends.shim.store.peers import StorePeers
from pollux.backends.transport.error_stream import say
from pollux.backends.transport.json_lines import LineReader
from pollux.wire.live import keys
from pollux.wire.live.codec import MAX_VALUE_BYTES
from pollux.wire.live.messages import FleetAccess
from pollux.wire.live.store_channel import StoreAccess, derived_secret, new_secret

__all__ = ["ListeningStore", "StoreHost", "is_possible"]

_SEND_SECONDS = 5.0
_BACKLOG = 1024


def is_possible() -> bool:
    """Whether PyTorch is installed, which replicas need to meet in a store."""
    return importlib.util.find_spec("torch") is not None


class ListeningStore:
    """A socket that accepts connections from now on; they are answered once a host is forked.

    It listens on this machine alone, or for a `fleet` at the address by which nodes reach this machine. `variable` is
    an environment variable for replicas, with the address and the secret. For a fleet it crosses the network, so a salt
    replaces the secret: only a holder of the fleet's secret can derive the store's secret from it.
    """

    def __init__(self, fleet: FleetAccess | None = None) -> None:
        head = "127.0.0.1" if fleet is None else fleet.head
        self._listener = socket.create_server((head, 0), backlog=_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        salt = "" if fleet is None else secrets.token_hex(16)
        secret = new_secret() if fleet is None else derived_secret(bytes.fromhex(fleet.secret), salt)
        self.access = StoreAccess(head, self.port, secret)
        self.variable = self.access.encode(salt)

    def fork_host(self, close_in_fork: Callable[[], None], control: socket.socket | None = None) -> int:
        """Fork the host, which ends with its parent; returns its pid. `control` is its end of the line to the shim."""
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            proc.die_with_parent(parent)
            proc.name_this("pollux-store")
            close_in_fork()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            # Garbage collection must not touch the parent's objects, so that their memory stays shared.
            gc.freeze()
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            # Some containers forbid it.
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            _serve(StorePeers(self._listener, self.access.secret), control)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    def close(self) -> None:
        """Close the socket in this process, not in the host."""
        self._listener.close()


class StoreHost:
    """The shim's side of the host of one job's store. `pid` None: the host has ended, and calls have no effect."""

    def __init__(self, close_in_fork: Callable[[], None], fleet: FleetAccess | None = None) -> None:
        listening = ListeningStore(fleet)
        self.port, self.address, self.variable = listening.port, listening.access.address, listening.variable
        with contextlib.ExitStack() as stack:
            stack.callback(listening.close)
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)

            def alone() -> None:
                close_in_fork()
                ours.close()

            try:
                self.pid: int | None = listening.fork_host(alone, theirs)
            except OSError:
                ours.close()
                raise
        ours.settimeout(_SEND_SECONDS)
        self.control = ours
        self._reader = LineReader(ours, MAX_LINE_BYTES)

    def set(self, key: str, text: str) -> None:
        """Write a key of `pollux.wire.live.keys`."""
        self._send(SetRequest(key, text))

    def watch(self, name: str, keys: Iterable[str], seconds: float, repeat: bool = False) -> None:
        """Read keys at this interval, and report each once, or at each change; without keys: stop watching."""
        self._send(WatchRequest(name, tuple(keys), seconds, repeat))

    def _send(self, request: SetRequest | WatchRequest) -> None:
        if self.pid is not None:
            with contextlib.suppress(OSError):
                self.control.sendall(encode_line(request))

    def found(self) -> list[tuple[str, str]] | None:
        """The keys and values that were reported since the last call; None once the host has ended."""
        lines = self._reader.lines()
        return None if lines is None else [(found.key, found.value) for found in map(decode_found, lines)]

    def close(self) -> None:
        """End the host."""
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
    """The host's side of the line: writes keys, and watches others, as the shim orders."""

    def __init__(self, peers: StorePeers, control: socket.socket) -> None:
        self._values = peers.values
        self._control = control
        self._watches: dict[str, _Watch] = {}
        self._reader = LineReader(control, MAX_LINE_BYTES)
        self.is_over = False
        peers.watch(control, self._hear)

    def send_changes(self) -> float | None:
        """Report the changes of watched keys that are due; the seconds until some are due again."""
        now = time.monotonic()
        for name, watch in [*self._watches.items()]:
            if watch.at <= now:
                watch.at = now + watch.seconds
                self._send_changes_of(watch)
                if not watch.keys:
                    del self._watches[name]
        return min((max(0.0, watch.at - now) for watch in self._watches.values()), default=None)

    def _hear(self) -> None:
        lines = self._reader.lines()
        if lines is None:
            self.is_over = True
            return
        for line in lines:
            self._obey(decode_request(line))

    def _obey(self, request: SetRequest | WatchRequest) -> None:
        if isinstance(request, SetRequest):
            try:
                self._values.set(_below(request.key), request.value.encode())
            except StoreRefusal as error:
                say(f"'{request.key}' was not set: {error}")
        else:
            self._watches.pop(request.name, None)
            if request.keys:
                self._watches[request.name] = _Watch([*request.keys], request.seconds, request.repeat)

    def _send_changes_of(self, watch: _Watch) -> None:
        for key in [*watch.keys]:
            value = self._values.get(_below(key))
            if value is None or watch.last.get(key) == value:
                continue
            watch.last[key] = value
            if len(value) > MAX_VALUE_BYTES:
                say(f"the value of '{key}' has {len(value)} bytes, and is ignored")
                continue
            self._control.sendall(encode_line(FoundMessage(key, value.decode(errors="replace"))))
            if not watch.repeat:
                watch.keys.remove(key)


def _below(key: str) -> bytes:
    return f"{keys.PREFIX}/{key}".encode()


def _serve(peers: StorePeers, control: socket.socket | None) -> None:
    watcher = None if control is None else _Watcher(peers, control)
    while watcher is None or not watcher.is_over:
        peers.turn(None if watcher is None else watcher.send_changes())
