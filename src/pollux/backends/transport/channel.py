"""Messages between a shim and the job runner on another machine: secret, authenticated, each delivered once, in order.

When a connection breaks, the next one sends again what was not confirmed. Messages are lines of JSON, never pickle, and
each line starts with a code that only holders of the secret can make; TLS hides them (`encryption`).
`wire.live.node_messages` defines the messages.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from pollux.backends.transport import encryption
from pollux.backends.transport.encryption import EncryptedSocket
from pollux.backends.transport.error_stream import say
from pollux.backends.transport.json_lines import LineReader
from pollux.core.errors import BackendFailed
from pollux.wire.live import PROTOCOL_VERSION
from pollux.wire.live.codec import MalformedValue, encode_tagged, from_plain, to_plain
from pollux.wire.live.node_messages import HelloMessage, ProvenRequest

__all__ = ["Channel", "SecureLine", "answer", "challenge", "check", "clock", "hello", "proof"]

_MAX_LINE_BYTES = 64 << 20
_MAX_STRANGER_BYTES = 64 << 10
_CODE_LENGTH = 32
_AGREED = "agreed"
_Heard = TypeVar("_Heard")


def clock() -> float:
    """Monotonic seconds that go on while the machine sleeps, as a lease must."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _code(key: bytes, *parts: bytes) -> str:
    return hmac.new(key, b"\0".join(parts), hashlib.sha256).hexdigest()[:_CODE_LENGTH]


def challenge() -> str:
    """A new random number."""
    return secrets.token_hex(16)


def hello(nonce: str) -> Any:
    """The plain `HelloMessage` of a daemon with this challenge."""
    return to_plain(HelloMessage(nonce, encryption.is_possible()))


def proof(secret: bytes, side: str, theirs: str, ours: str, request: str) -> str:
    """The answer to a challenge that only a holder of the secret can give; it covers the `request` too."""
    return _code(secret, side.encode(), theirs.encode(), ours.encode(), request.encode())


def answer(secret: bytes, line: SecureLine, heard: Any, request: object) -> str:
    """The caller's side: answer the daemon's hello with a proof and the request; returns the caller's challenge."""
    try:
        said = from_plain(HelloMessage, heard)
    except MalformedValue:
        said = None
    if said is None or said.version != PROTOCOL_VERSION:
        raise BackendFailed(f"the host at {line.where} speaks another version ({heard!r:.80}): install the same Pollux")
    if said.encrypts is not encryption.is_possible():
        # Do not adapt to the other side: an attacker in between would say that it cannot encrypt.
        raise BackendFailed(
            f"only one of this machine and the host at {line.where} can encrypt the connection: give both a Python "
            "with the same OpenSSL, and the same rules for it (FIPS)"
        )
    ours, theirs, text = challenge(), said.nonce, encode_tagged(request)
    line.put(to_plain(ProvenRequest(ours, text, proof(secret, "shim", theirs, ours, text))))
    line.secure(_code(secret, b"key", theirs.encode(), ours.encode()).encode(), "shim")
    line.encrypt()
    return ours


def check(secret: bytes, line: SecureLine, nonce: str, said: Any) -> str:
    """The daemon's side: the request, as text, of a caller that knows the secret; BackendFailed for any other."""
    try:
        asked = from_plain(ProvenRequest, said)
        known = proof(secret, "shim", nonce, asked.nonce, asked.request)
        is_good = hmac.compare_digest(asked.proof.encode(), known.encode())
    except ValueError:
        is_good = False
    if not is_good:
        raise BackendFailed(f"{line.where} does not know this fleet's secret")
    line.secure(_code(secret, b"key", nonce.encode(), asked.nonce.encode()).encode(), "host")
    return asked.request


class SecureLine:
    """A connection that sends and receives values without waiting. Once `secure`, a line with a wrong code ends it.

    Once told to `encrypt`, it keeps what it is to send until the other side has shown that both have the same key.
    """

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
        self._tls: EncryptedSocket | None = None
        self._has_agreed = False
        self._waiting: list[bytes] | None = None

    def secure(self, key: bytes, side: str) -> None:
        """Add a code to each line from now on, and check those that come; `side` is ours."""
        self._key = key
        self._reader.max_bytes = _MAX_LINE_BYTES
        self._sides = (b"shim", b"host") if side == "shim" else (b"host", b"shim")

    def encrypt(self) -> None:
        """Encrypt the connection, if OpenSSL can. The process that keeps the connection calls it.

        The host starts the TLS handshake, so that none of it comes before another process has the connection.
        """
        if encryption.is_possible():
            self._waiting = []
            try:
                self._tls = EncryptedSocket(self.peer, is_client=self._sides[0] == b"host")
            except OSError:
                self.broken = True
                return
            self._reader = LineReader(self._tls, _MAX_LINE_BYTES)

    @property
    def key(self) -> str:
        """The key for another process that takes over this connection right after `secure`."""
        return self._key.decode()

    def put(self, value: Any) -> None:
        """Send a value: what the socket takes now, and the rest later."""
        payload = json.dumps(value).encode()
        if self._waiting is None:
            self._enqueue(payload)
            self.flush()
        else:
            self._waiting.append(payload)

    def _enqueue(self, payload: bytes) -> None:
        if self._key:
            code = _code(self._key, self._sides[0], str(self._counts[0]).encode(), payload)
            self._counts[0] += 1
            payload = code.encode() + payload
        self._out += payload + b"\n"

    @property
    def wants_to_write(self) -> bool:
        """Whether there are bytes to send once the socket takes them."""
        kept = self._tls is not None and self._tls.wants_to_write
        return (bool(self._out) or kept) and not self.broken

    def finish(self, seconds: float) -> None:
        """Wait at most this long until everything is sent or the connection is broken."""
        deadline = time.monotonic() + seconds
        while (self._waiting or self.wants_to_write) and not self.broken and time.monotonic() < deadline:
            writes = [self.peer] if self.wants_to_write else []
            if select.select([self.peer], writes, [], max(0.0, deadline - time.monotonic()))[0]:
                self.get()
            self.flush()

    def flush(self) -> None:
        """Send the bytes that are left, as many as the socket takes now."""
        try:
            if self._tls is not None:
                self._tls.flush()
            while self._out and not self.broken:
                del self._out[: (self._tls or self.peer).send(self._out[: 1 << 18])]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.broken = True

    def get(self) -> list[Any]:
        """The values that came since the last call; `broken` says whether more can come."""
        lines = self._reader.lines()
        if lines is None:
            self.broken = True
            return []
        self._use_agreement()
        if not self._key and len(lines) > 1:
            # Until both share a key, each side sends one line at a time: a second one would be read without its code.
            self.broken = True
            return []
        values = []
        for line in lines:
            try:
                value = self._opened(line)
                if self._waiting is None:
                    values.append(value)
                else:
                    self._send_waiting(value)
            except (ValueError, RecursionError):
                self.broken = True
                break
        return values

    def _use_agreement(self) -> None:
        """Confirm the agreed key: an attacker in between has another agreement with each side, and codes do not fit."""
        if self._tls is not None and self._tls.binding and not self._has_agreed:
            self._has_agreed = True
            self._key = _code(self._key, _AGREED.encode(), self._tls.binding).encode()
            self._enqueue(json.dumps(_AGREED).encode())
            self.flush()

    def _send_waiting(self, heard: Any) -> None:
        """Send what was kept: the other side has the same key."""
        if heard != _AGREED:
            raise ValueError("not what comes first")
        waiting, self._waiting = self._waiting or [], None
        for payload in waiting:
            self._enqueue(payload)
        self.flush()

    def _opened(self, line: bytes) -> Any:
        if self._key:
            said, line = line[:_CODE_LENGTH], line[_CODE_LENGTH:]
            code = _code(self._key, self._sides[1], str(self._counts[1]).encode(), line)
            self._counts[1] += 1
            if not hmac.compare_digest(said, code.encode()):
                raise ValueError("not authentic")
        return json.loads(line)

    def close(self) -> None:
        """Close the connection."""
        self.broken = True
        self.peer.close()


class Channel(Generic[_Heard]):
    """Numbered messages over one connection after another; `line` is None while there is no connection.

    `decode` makes a message of a text; a malformed one is dropped, with a line on the error stream. `seen` is the
    number of the last message that came. `confirmed_at` is when the newest confirmed message was sent: the other side
    has heard from us at that time or later.
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
        """Use this connection from now on; the other side has `seen` messages up to this number."""
        self.line = line
        self._confirm(seen)
        for number, _, text in self._kept:
            line.put([number, text])
        self.confirm()

    def detach(self) -> None:
        """Close the connection; messages are kept until the next one."""
        if self.line is not None:
            self.line.close()
            self.line = None

    def send(self, message: object) -> None:
        """Send a message over this connection, or over the next one."""
        text = encode_tagged(message)
        self._number += 1
        self.unconfirmed_bytes += len(text)
        self._kept.append((self._number, clock(), text))
        if self.line is not None:
            self.line.put([self._number, text])

    def confirm(self) -> None:
        """Tell the other side the number of the last message that came."""
        if self.line is not None:
            self.line.put([0, self.seen])
            self._unheard = 0

    def receive(self) -> list[_Heard]:
        """New messages that came over the connection."""
        return [] if self.line is None else self.take(self.line.get())

    def take(self, values: Iterable[Any]) -> list[_Heard]:
        """New messages among these values, which the caller has read from the connection."""
        fresh = []
        for value in values:
            try:
                fresh += self._read(value)
            except MalformedValue as error:
                where = "a line" if self.line is None else self.line.where
                say(f"a message from {where} is refused: {error}")
        if self._unheard > 1 << 18:
            self.confirm()
        return fresh

    def _read(self, value: Any) -> list[_Heard]:
        """The message in a value; none where it came before, or where the value confirms messages of ours."""
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
