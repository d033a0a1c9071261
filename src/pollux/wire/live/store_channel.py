"""Mutual authentication of a replica and the job's store, and authentication of their messages.

Each side sends 32 random bytes, and proves with a code of both sides' bytes that it knows the secret. Afterwards every
frame has a code of its body and number, with a key of this connection and direction, so that nobody can add, change,
omit or repeat a frame. Nothing is encrypted. The callers open the sockets.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "CODE_BYTES",
    "GREETING",
    "JOIN_VARIABLE",
    "MAX_FRAME_BYTES",
    "MAX_KEY_BYTES",
    "MAX_PARTS",
    "NONCE_BYTES",
    "SECRET_VARIABLE",
    "STORE_VARIABLE",
    "BrokenFrame",
    "FrameReader",
    "FrameWriter",
    "StoreAccess",
    "StoreOperation",
    "derived_secret",
    "frames",
    "new_secret",
    "nonce",
    "pack",
    "proof",
    "unpack",
    "with_derived_secret",
]

SECRET_VARIABLE = "POLLUX_STORE_SECRET"
STORE_VARIABLE = "POLLUX_STORE"
JOIN_VARIABLE = "POLLUX_JOIN"
GREETING = b"pollux/1"
"""The first bytes of a connection; no other protocol of a store begins so."""

NONCE_BYTES = 32
CODE_BYTES = 32
MAX_KEY_BYTES = 4 << 10
MAX_FRAME_BYTES = 64 << 20
MAX_PARTS = 200_000
_HEADER = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_START = struct.Struct("!BI")
_SALTED = "salt:"


class BrokenFrame(ValueError):
    """The bytes are not a valid frame: changed, repeated, too long, or without meaning."""


class StoreOperation(IntEnum):
    """The requests to the store, and its answers. Their parts are keys, values and decimal numbers."""

    SET = 1
    GET = 2
    ADD = 3
    CHECK = 4
    WAIT = 5
    COMPARE_SET = 6
    DELETE = 7
    COUNT = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    DONE = 100
    LATE = 101
    REFUSED = 102


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The address of a job's store, and the secret that authenticates the job's replicas."""

    host: str
    port: int
    secret: bytes

    @property
    def address(self) -> str:
        """As "host:port"."""
        return f"{self.host}:{self.port}"

    def encode(self, salt: str = "") -> str:
        """The value of a replica's variable: the secret, or a salt from which the replica's node derives it."""
        return f"{self.address} {_SALTED + salt if salt else self.secret.hex()}"

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> StoreAccess | None:
        """The access in the variables of this process; None if there is none, ValueError if it is malformed."""
        text = variables.get(SECRET_VARIABLE, "")
        if not text:
            return None
        address, _, secret = text.partition(" ")
        host, _, port = address.rpartition(":")
        if not host or len(bytes.fromhex(secret)) < CODE_BYTES or not 0 < int(port) < 1 << 16:
            raise ValueError("it is no address with a secret")
        return cls(host, int(port), bytes.fromhex(secret))


def new_secret() -> bytes:
    """A new secret for one store."""
    return secrets.token_bytes(CODE_BYTES)


def derived_secret(secret: bytes, salt: str) -> bytes:
    """The secret of the store with that salt, derived from the secret of its fleet."""
    return _code(secret, b"store", salt.encode())


def with_derived_secret(variables: Mapping[str, str], secret: bytes) -> dict[str, str]:
    """The variables of a replica, with the salt in them replaced by the derived secret."""
    own = dict(variables)
    address, _, salt = own.get(SECRET_VARIABLE, "").partition(f" {_SALTED}")
    if salt:
        own[SECRET_VARIABLE] = f"{address} {derived_secret(secret, salt).hex()}"
    return own


def nonce() -> bytes:
    """New random bytes."""
    return os.urandom(NONCE_BYTES)


def _code(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), hashlib.sha256)


def proof(secret: bytes, side: bytes, asked: bytes, answered: bytes) -> bytes:
    """A code of `side` (b"replica" or b"store") and the random bytes of both, made with the secret."""
    return _code(secret, b"proof of the " + side, asked + answered)


def frames(secret: bytes, side: bytes, asked: bytes, answered: bytes) -> tuple[FrameReader, FrameWriter]:
    """The reading and the writing end of that side, once both have proved themselves."""
    theirs = b"store" if side == b"replica" else b"replica"
    keys = [_code(secret, b"frames of the " + each, asked + answered) for each in (theirs, side)]
    return FrameReader(keys[0]), FrameWriter(keys[1])


class FrameWriter:
    """Makes frames: puts the code before each body."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def frame(self, body: bytes) -> bytes:
        """The next frame, with that body."""
        if len(body) > MAX_FRAME_BYTES:
            raise BrokenFrame(f"{len(body)} bytes are more than the {MAX_FRAME_BYTES} of a message to the store")
        code = hmac.digest(self._key, _NUMBER.pack(self._count) + body, hashlib.sha256)
        self._count += 1
        return _HEADER.pack(len(body)) + code + body


class FrameReader:
    """Splits received bytes into bodies, and checks their codes; after a `BrokenFrame` the connection must end."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """The bodies that are complete with this piece."""
        rest, bodies, at = self._rest, [], 0
        rest += piece
        while len(rest) - at >= _HEADER.size + CODE_BYTES:
            (size,) = _HEADER.unpack_from(rest, at)
            if size > MAX_FRAME_BYTES:
                raise BrokenFrame(f"a frame of {size} bytes")
            begin = at + _HEADER.size + CODE_BYTES
            if len(rest) < begin + size:
                break
            body = bytes(rest[begin : begin + size])
            code = hmac.digest(self._key, _NUMBER.pack(self._count) + body, hashlib.sha256)
            if not hmac.compare_digest(code, bytes(rest[at + _HEADER.size : begin])):
                raise BrokenFrame("a frame with a wrong code")
            self._count += 1
            bodies.append(body)
            at = begin + size
        del rest[:at]
        return bodies


def pack(operation: StoreOperation, parts: Sequence[bytes]) -> bytes:
    """A request or an answer as the body of a frame."""
    sizes = struct.pack(f"!{len(parts)}I", *map(len, parts))
    return b"".join((_START.pack(operation, len(parts)), sizes, *parts))


def unpack(body: bytes) -> tuple[StoreOperation, list[bytes]]:
    """The arguments of `pack`; `BrokenFrame` for any other body."""
    try:
        number, count = _START.unpack_from(body)
        operation = StoreOperation(number)
        if count > MAX_PARTS:
            raise BrokenFrame(f"a message of {count} parts")
        sizes = struct.unpack_from(f"!{count}I", body, _START.size)
    except (struct.error, ValueError) as error:
        raise BrokenFrame(f"a message without a meaning: {error}") from None
    at = _START.size + 4 * count
    if at + sum(sizes) != len(body):
        raise BrokenFrame("a message with parts of another length")
    parts = []
    for size in sizes:
        parts.append(body[at : at + size])
        at += size
    return operation, parts
