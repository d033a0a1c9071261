"""Values of the live protocol as JSON text and back: frozen dataclasses, read strictly and within bounds.

Only the length of a whole value is limited, since the environment of a job may be longer than any text of a request.
Readers ignore values that do not fit.
"""

from __future__ import annotations

import base64
import json
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pollux.wire._entry import MAX_INTEGER
from pollux.wire.dataclass_codec import (
    SCALAR_READERS,
    Misfit,
    ValueReader,
    ValueWriter,
    as_it_is,
    instead_of,
    read_number,
    read_text,
)
from pollux.wire.live import PROTOCOL_VERSION

__all__ = [
    "MAX_VALUE_BYTES",
    "MalformedValue",
    "classes_by_name",
    "decode",
    "decode_tagged",
    "encode",
    "encode_tagged",
    "from_plain",
    "read_json",
    "to_plain",
]

MAX_VALUE_BYTES = 1 << 20
"""The largest value that is read from a key."""

_T = TypeVar("_T")


class MalformedValue(ValueError):
    """A value that does not fit the live protocol; readers ignore it."""


def encode(value: object) -> str:
    """A dataclass, or a plain value, as JSON on one line."""
    return json.dumps(to_plain(value))


def to_plain(value: object) -> Any:
    """A dataclass, or a plain value, as dicts, lists and scalars; bytes as base64."""
    try:
        return _write(value)
    except Misfit as misfit:
        raise TypeError(misfit.message("")) from None


def classes_by_name(union: Any) -> Mapping[str, type]:
    """The dataclasses of a union, for `decode_tagged`."""
    return {kind.__name__: kind for kind in typing.get_args(union)}


def encode_tagged(message: object) -> str:
    """A dataclass as JSON on one line, with the name of its class."""
    return json.dumps([type(message).__name__, to_plain(message)])


def decode_tagged(classes: Mapping[str, type], text: str | bytes, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """The message that `encode_tagged` wrote; `MalformedValue` for any other class or text."""
    value = read_json(text, max_bytes)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or value[0] not in classes:
        raise MalformedValue(f"{str(value)[:60]!r} is not a message of version {PROTOCOL_VERSION} of the protocol")
    return from_plain(classes[value[0]], value[1])


def decode(kind: type[_T], text: str | bytes) -> _T:
    """The value that `encode` wrote; `MalformedValue` for any other text."""
    return from_plain(kind, read_json(text))


def read_json(text: str | bytes, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """The plain value of a JSON text; `MalformedValue` if it is too long, too deep or not JSON."""
    if len(text) > max_bytes:
        raise MalformedValue(f"{len(text)} bytes are more than the limit of {max_bytes}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedValue(f"{text[:60]!r} is not valid JSON: {error}"[:200]) from None


def from_plain(kind: type[_T], value: object) -> _T:
    """The value of that type from plain values; `MalformedValue` if they do not fit."""
    try:
        return typing.cast("_T", _read(kind, value))
    except Misfit as misfit:
        raise MalformedValue(misfit.message(kind.__name__)) from None


def _read_number(value: Any) -> float:
    number = read_number(value)
    if abs(number) > MAX_INTEGER:
        raise instead_of(value, "a number below 2^63")
    return number


def _read_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(read_text(value), validate=True)
    except ValueError:
        raise instead_of(value, "base64") from None


def _write_bytes(value: bytes, depth: int) -> str:
    return base64.b64encode(value).decode()


_write = ValueWriter({**dict.fromkeys((type(None), bool, str, int, float), as_it_is), bytes: _write_bytes})
_read = ValueReader({**SCALAR_READERS, float: _read_number, bytes: _read_bytes, Any: lambda value: value})
