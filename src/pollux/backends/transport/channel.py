"""Messages between a shim and what runs its replicas on another machine: authentic, each once, in order.

A connection may break and another take its place; what was not confirmed is sent again. Lines of JSON, no pickle; each
carries a code that only holders of the secret can make. What the messages mean is not known here: they are those of
`pollux.wire.live.node_messages`.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from pollux.backends.transport.json_lines import LineReader
from pollux.core.errors import BackendFailed
from pollux.wire.live.codec import MalformedValue, encode_tagged

__all__ = ["VERSION", "Channel", "SecureLine", "answer", "challenge", "check", "clock", "proof"]

VERSION = 2
"""Of the messages; both sides must have the same."""

_MAX_LINE_BYTES = 64 << 20
_MAX_STRANGER_BYTES = 64 << 10
_CODE_LENGTH = 32
_Side = str
_Heard = TypeVar("_Heard")


def clock() -> float:
    """Seconds that also count while the machine sleeps, as a lease must."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _code(key: bytes, *parts: bytes) -> str:
    return hmac.new(key, b"\0".join(parts), hashlib.sha256).hexdigest()[:_CODE_LENGTH]


def challenge() -> str:
    """A number that nobody has used before."""
    return secrets.token_hex(16)


def proof(secret: bytes, side: _Side, theirs: str, ours: str, request: str) -> str:
    """What only a holder of the secret can say to a challenge; `request` is bound to it."""
    return _code(secret, side.encode(), theirs.encode(), ours.encode(), request.encode())


def answer(secret: bytes, line: SecureLine, hello: Any, request: Mapping[str, Any]) -> str:
    """The caller's side, having heard the hello: prove who we are and say what we want; our own challenge."""
    if not isinstance(hello, Mapping) or hello.get("version") != VERSION or not isinstance(hello.get("nonce"), str):
        raise BackendFailed(f"the host at {line.where} speaks another version ({hello!r:.80}): install the same Pollux")
    ours, theirs, text = challenge(), str(hello["nonce"]), json.dumps(request)
    line.put({"nonce": ours, "request": text, "proof": proof(secret, "shim", theirs, ours, text)})
    line.secure(_code(secret, b"key", theirs.encode(), ours.encode()).encode(), "shim")
    return ours


def check(secret: bytes, line: SecureLine, nonce: str, said: Any) -> dict[str, Any]:
    """The host's side: what a caller wants that has proved who it is; BackendFailed for anyone else."""
    try:
        text, theirs = str(said["request"]), str(said["nonce"])
        good = hmac.compare_digest(str(said["proof"]), proof(secret, "shim", nonce, theirs, text))
        request = json.loads(text) if good else None
    except (KeyError, TypeError, ValueError):
        request = None
    if not isinstance(request, dict):
        raise BackendFailed(f"{line.where} does not know this fleet's secret")
    line.secure(_code(secret, b"key", nonce.encode(), theirs.encode()).encode(), "host")
    return request


class SecureLine:
    """One connection: values in, values out, nothing waits. Once it is `secure`, what is not authentic ends it."""

    def __init__(self, peer: socket.socket, where: str = "") -> None:
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.where = where
        self.broken = False
        self._key = b""
        self._sides: tuple[bytes, bytes] = (b"", b"")
        self._counts = [0, 0]
        self._reader = LineReader(peer, _MAX_STRANGER_BYTES)
        self._out = bytearray()

    def secure(self, key: bytes, side: _Side) -> None:
        """From here on every line carries a code; `side` is ours."""
        self._key = key
        self._reader.max_bytes = _MAX_LINE_BYTES
        self._sides = (b"shim", b"host") if side == "shim" else (b"host", b"shim")

    def identity(self) -> dict[str, Any]:
        """What another process needs to go on with this connection right after `secure`."""
        return {"key": self._key.decode(), "where": self.where}

    def put(self, value: Any) -> None:
        """Send, as far as the other side takes it now."""
        payload = json.dumps(value).encode()
        if self._key:
            code = _code(self._key, self._sides[0], str(self._counts[0]).encode(), payload)
            self._counts[0] += 1
            payload = code.encode() + payload
        self._out += payload + b"\n"
        self.flush()

    @property
    def wants_to_write(self) -> bool:
        """Whether something still has to be sent."""
        return bool(self._out) and not self.broken

    def flush(self) -> None:
        """Send what is left."""
        while self._out and not self.broken:
            try:
                sent = self.peer.send(self._out[: 1 << 18])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.broken = True
                return
            del self._out[:sent]

    def get(self) -> list[Any]:
        """What came since the last time; see `broken` for whether more can come."""
        lines = self._reader.lines()
        if lines is None:
            self.broken = True
            return []
        values = []
        for line in lines:
            try:
                values.append(self._opened(line))
            except ValueError:
                self.broken = True
                break
        return values

    def _opened(self, line: bytes) -> Any:
        if self._key:
            said, line = line[:_CODE_LENGTH], line[_CODE_LENGTH:]
            code = _code(self._key, self._sides[1], str(self._counts[1]).encode(), line)
            self._counts[1] += 1
            if not hmac.compare_digest(said, code.encode()):
                raise ValueError("not authentic")
        return json.loads(line)

    def close(self) -> None:
        """Give the connection up."""
        self.broken = True
        self.peer.close()


class Channel(Generic[_Heard]):
    """Numbered messages over one `line` after another; None while there is none.

    `decode` makes a message of a text; one that it calls malformed is refused, with a line on the error stream. `seen`
    is the last number that came. `confirmed_at` is when the newest message that the other side has confirmed was sent:
    so long ago at most it heard from us.
    """

    def __init__(self, decode: Callable[[str], _Heard]) -> None:
        self._decode = decode
        self.line: SecureLine | None = None
        self.seen = 0
        self.confirmed_at = clock()
        self.unconfirmed_bytes = 0
        self._number = 0
        self._unheard = 0
        self._kept: collections.deque[tuple[int, float, str]] = collections.deque()

    def attach(self, line: SecureLine, seen: int) -> None:
        """Go on over this line; the other side has `seen` so much."""
        self.line = line
        self._confirm(seen)
        for number, _, text in self._kept:
            line.put([number, text])
        self.confirm()

    def detach(self) -> None:
        """The line is no more."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def send(self, message: object) -> None:
        """Have it arrive, now or over the next line."""
        text = encode_tagged(message)
        self._number += 1
        self.unconfirmed_bytes += len(text)
        self._kept.append((self._number, clock(), text))
        if self.line is not None:
            self.line.put([self._number, text])

    def confirm(self) -> None:
        """Tell what has come so far."""
        if self.line is not None:
            self.line.put([0, self.seen])
            self._unheard = 0

    def receive(self) -> list[_Heard]:
        """Messages that came and were not known yet."""
        return [] if self.line is None else self.take(self.line.get())

    def take(self, values: Iterable[Any]) -> list[_Heard]:
        """The same of values that were read from its line by others."""
        fresh = []
        for value in values:
            try:
                fresh += self._read(value)
            except MalformedValue as error:
                where = "a line" if self.line is None else self.line.where
                print(f"a message from {where} is refused: {error}", file=sys.stderr, flush=True)
        if self._unheard > 1 << 18:
            self.confirm()
        return fresh

    def _read(self, value: Any) -> list[_Heard]:
        """The message in a value, unless it is known already or only confirms what we sent."""
        match value:
            case [0, int() as seen]:
                self._confirm(seen)
            case [int() as number, str() as text]:
                if number == self.seen + 1:
                    self.seen = number
                    self._unheard += len(text)
                    return [self._decode(text)]
            case _:
                raise MalformedValue(f"{str(value)[:60]!r} has no number and no text")
        return []

    def _confirm(self, seen: int) -> None:
        while self._kept and self._kept[0][0] <= seen:
            _, at, text = self._kept.popleft()
            self.unconfirmed_bytes -= len(text)
            self.confirmed_at = max(self.confirmed_at, at)
