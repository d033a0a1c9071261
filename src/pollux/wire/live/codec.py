"""Values of the live protocol as JSON text and back: frozen dataclasses, read strictly and within bounds.

The bound is the length of a whole value: the environment of a job may be longer than any text of a request. Whoever
reads a value that does not fit ignores it.
"""

from __future__ import annotations

import json
import typing
from typing import Any, TypeVar

from pollux.wire._entry import MAX_INTEGER
from pollux.wire.dataclass_codec import (
    SCALAR_READERS,
    Refusal,
    ValueReader,
    ValueWriter,
    as_it_is,
    instead_of,
    read_number,
)

__all__ = ["MAX_VALUE_BYTES", "MalformedValue", "decode", "encode", "from_plain", "read_json", "to_plain"]

MAX_VALUE_BYTES = 1 << 20
"""The largest value of a key that is read."""

_T = TypeVar("_T")


class MalformedValue(ValueError):
    """A value is not what the live protocol has there; whoever reads it ignores it."""


def encode(value: object) -> str:
    """A dataclass, or a plain value, as JSON on one line."""
    return json.dumps(to_plain(value))


def to_plain(value: object) -> Any:
    """A dataclass, or a plain value, as dicts, lists and scalars."""
    try:
        return _write(value)
    except Refusal as refusal:
        raise TypeError(refusal.message("")) from None


def decode(kind: type[_T], text: str | bytes) -> _T:
    """The value that `encode` made the text of; `MalformedValue` for any other text."""
    return from_plain(kind, read_json(text))


def read_json(text: str | bytes, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """The plain value of a JSON text; `MalformedValue` where it is too long, too deep or no JSON."""
    if len(text) > max_bytes:
        raise MalformedValue(f"{len(text)} bytes are more than the {max_bytes} that are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedValue(f"{text[:60]!r} is no JSON that can be read: {error}"[:200]) from None


def from_plain(kind: type[_T], value: object) -> _T:
    """The value of that type from plain values; `MalformedValue` where they do not fit."""
    try:
        return typing.cast("_T", _read(kind, value))
    except Refusal as refusal:
        raise MalformedValue(refusal.message(kind.__name__)) from None


def _read_number(value: Any) -> float:
    number = read_number(value)
    if abs(number) > MAX_INTEGER:
        raise instead_of(value, "a number below 2^63")
    return number


_write = ValueWriter(dict.fromkeys((type(None), bool, str, int, float), as_it_is))
_read = ValueReader({**SCALAR_READERS, float: _read_number, Any: lambda value: value})
