"""The messages between a shim and the host of its job's store, each a line of JSON. Both are of one version."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.wire.live.codec import classes_by_name, decode_tagged, encode_tagged

__all__ = [
    "MAX_LINE_BYTES",
    "FoundMessage",
    "SetRequest",
    "WatchRequest",
    "decode_found",
    "decode_request",
    "encode_line",
]

MAX_LINE_BYTES = 16 << 20
"""The longest line that is read."""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """Write a key of `pollux.wire.live.keys`."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """Read these keys at this interval, and report each once, or at each change; without keys: end the watch `name`."""

    name: str
    keys: tuple[str, ...]
    seconds: float
    repeat: bool


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A watched key has this value."""

    key: str
    value: str


_REQUESTS = classes_by_name(SetRequest | WatchRequest)


def encode_line(message: SetRequest | WatchRequest | FoundMessage) -> bytes:
    """The message as one line."""
    return encode_tagged(message).encode() + b"\n"


def decode_request(line: bytes) -> SetRequest | WatchRequest:
    """The shim's request of a line; `MalformedValue` for any other line."""
    request: SetRequest | WatchRequest = decode_tagged(_REQUESTS, line, MAX_LINE_BYTES)
    return request


def decode_found(line: bytes) -> FoundMessage:
    """The host's message of a line; `MalformedValue` for any other line."""
    found: FoundMessage = decode_tagged({FoundMessage.__name__: FoundMessage}, line, MAX_LINE_BYTES)
    return found
