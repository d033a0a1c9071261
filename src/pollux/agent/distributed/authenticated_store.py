"""The job's store as a store of PyTorch's, over connections on which both sides have proved that they know the secret.

`pollux.wire.live.store_channel` has the messages and their protection.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import hmac
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from pollux.wire.live import store_channel
from pollux.wire.live.store_channel import BrokenFrame, StoreAccess, StoreOperation

__all__ = ["AuthenticatedStore"]

_READ_BYTES = 1 << 18
_CONNECT_SECONDS = 20.0
# The store itself answers when keys are late; without an answer for this much longer it counts as lost.
_GRACE_SECONDS = 10.0
_MOST_SECONDS = 1e6
# PyTorch's groups call this object as long as they live, without keeping a reference to it.
_kept: list[AuthenticatedStore] = []


class _Connection:
    """One authenticated connection, for one request at a time."""

    def __init__(self, access: StoreAccess, seconds: float) -> None:
        self._line = socket.create_connection((access.host, access.port), timeout=min(seconds, _CONNECT_SECONDS))
        try:
            self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._reader, self._writer = self._prove(access.secret)
        except BaseException:
            self._line.close()
            raise

    def _prove(self, secret: bytes) -> tuple[store_channel.FrameReader, store_channel.FrameWriter]:
        asked = store_channel.nonce()
        self._line.sendall(store_channel.GREETING + asked)
        said = b""
        while len(said) < store_channel.NONCE_BYTES + store_channel.CODE_BYTES:
            said += self._hear(store_channel.NONCE_BYTES + store_channel.CODE_BYTES - len(said))
        answered, theirs = said[: store_channel.NONCE_BYTES], said[store_channel.NONCE_BYTES :]
        if not hmac.compare_digest(theirs, store_channel.proof(secret, b"store", asked, answered)):
            raise ConnectionError("the process that answers there does not know the job's secret")
        self._line.sendall(store_channel.proof(secret, b"replica", asked, answered))
        return store_channel.frames(secret, b"replica", asked, answered)

    def _hear(self, size: int = _READ_BYTES) -> bytes:
        piece = self._line.recv(size)
        if not piece:
            raise ConnectionError("the store has ended the connection")
        return piece

    def ask(
        self, operation: StoreOperation, parts: Sequence[bytes], seconds: float
    ) -> tuple[StoreOperation, list[bytes]]:
        self._line.settimeout(min(seconds + _GRACE_SECONDS, _MOST_SECONDS))
        self._line.sendall(self._writer.frame(store_channel.pack(operation, parts)))
        while True:
            bodies = self._reader.feed(self._hear())
            if bodies:
                return store_channel.unpack(bodies[0])

    def close(self) -> None:
        self._line.close()


class AuthenticatedStore(dist.Store):
    """A store for any number of threads: each request has a connection of its own, which a later request reuses.

    So a request that waits for a key delays no other. Errors are PyTorch's: `DistStoreError` where keys did not come in
    time, `DistNetworkError` where the store does not answer.
    """

    def __init__(self, access: StoreAccess, timeout: float) -> None:
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=timeout))
        self._access = access
        self._process = os.getpid()
        self._free: collections.deque[_Connection] = collections.deque()
        self._give_back(self._connect())
        _kept.append(self)

    @property
    def _patience(self) -> float:
        """How many seconds to wait for keys. PyTorch's own code may change them, in the base class."""
        limit: datetime.timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    # What PyTorch asks, from Python and from its own threads

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._ask(StoreOperation.SET, [key.encode(), _bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a key; returns its value."""
        return self._await(StoreOperation.GET, [key], None)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; returns the new number."""
        return int(self._ask(StoreOperation.ADD, [key.encode(), b"%d" % amount])[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys exist."""
        return self._ask(StoreOperation.CHECK, [key.encode() for key in keys])[0] == b"1"

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all these keys exist."""
        self._await(StoreOperation.WAIT, keys, timeout)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write a key if it has the expected value; returns its value after that."""
        return self._ask(StoreOperation.COMPARE_SET, [key.encode(), _bytes(expected), _bytes(desired)])[0]

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return self._ask(StoreOperation.DELETE, [key.encode()])[0] == b"1"

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self._ask(StoreOperation.COUNT, [])[0])

    # PyTorch's own code calls the two by these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._ask(StoreOperation.APPEND, [key.encode(), _bytes(value)])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for keys; returns their values."""
        return self._await(StoreOperation.MULTI_GET, keys, None)

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        """Write keys."""
        pairs = zip(keys, values, strict=True)
        self._ask(StoreOperation.MULTI_SET, [part for key, value in pairs for part in (key.encode(), _bytes(value))])

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` exist: yes."""
        return True

    def clone(self) -> AuthenticatedStore:
        """This store, which any thread may use."""
        return self

    # Requests

    def _await(self, operation: StoreOperation, keys: Sequence[str], timeout: datetime.timedelta | None) -> list[bytes]:
        seconds = self._patience if timeout is None else timeout.total_seconds()
        parts = [b"%d" % round(seconds * 1000), *(key.encode() for key in keys)]
        return self._ask(operation, parts, seconds, keys)

    def _ask(
        self, operation: StoreOperation, parts: list[bytes], seconds: float | None = None, keys: Sequence[str] = ()
    ) -> list[bytes]:
        connection = self._take()
        try:
            patience = self._patience if seconds is None else seconds
            outcome, answer = connection.ask(operation, parts, patience)
        except (OSError, BrokenFrame) as error:
            connection.close()
            raise dist.DistNetworkError(f"the job's store at {self._access.address} is gone: {error}") from error
        except BaseException:
            # A signal came in between: the next request must not read the answer to this one.
            connection.close()
            raise
        self._give_back(connection)
        if outcome is StoreOperation.LATE:
            few = ", ".join([*keys[:3], *(["..."] if len(keys) > 3 else [])])
            raise dist.DistStoreError(f"waited {seconds:g} s for {few} in the job's store, and it was not written")
        if outcome is StoreOperation.REFUSED:
            raise dist.DistStoreError(f"the job's store refused a request: {b''.join(answer).decode(errors='replace')}")
        return answer

    def _take(self) -> _Connection:
        if self._process != os.getpid():
            # This is a worker forked from the replica, and must not use its parent's connections.
            self._free, self._process = collections.deque(), os.getpid()
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return self._connect()

    def _give_back(self, connection: _Connection) -> None:
        self._free.append(connection)

    def close(self) -> None:
        """Close the connections; no group may use the store afterwards."""
        while self._free:
            self._free.pop().close()
        if self in _kept:
            _kept.remove(self)

    def _connect(self) -> _Connection:
        try:
            return _Connection(self._access, self._patience)
        except OSError as error:
            raise dist.DistNetworkError(f"the job's store at {self._access.address} cannot be used: {error}") from error


@atexit.register
def _close_all() -> None:
    for store in [*_kept]:
        store.close()


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
