"""Values of the live protocol as JSON text and back: frozen dataclasses, read strictly and within bounds.

The codec in `pollux.wire.codec` does the same for people's requests, with a remedy in every message; here a value that
does not fit is ignored by whoever reads it, and the environment of a job may be longer than any request.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

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
"""The largest value of a key that is read."""

_MAX_INTEGER = 2**63 - 1
_SCALARS = (str, int, bool)
_T = TypeVar("_T")


class MalformedValue(ValueError):
    """A value is not what the live protocol has there; whoever reads it ignores it."""


def encode(value: object) -> str:
    """A dataclass, or a plain value, as JSON on one line."""
    return json.dumps(to_plain(value))


def to_plain(value: object) -> Any:
    """A dataclass as dicts, lists and scalars; any other value as it is."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def classes_by_name(union: Any) -> Mapping[str, type]:
    """The dataclasses of a union, for `decode_tagged`."""
    return {kind.__name__: kind for kind in typing.get_args(union)}


def encode_tagged(message: object) -> str:
    """A dataclass as JSON on one line, with the name of its class; bytes as base64."""
    return json.dumps([type(message).__name__, to_plain(message)], default=_bytes_as_text)


def decode_tagged(classes: Mapping[str, type], text: str | bytes, max_bytes: int = MAX_VALUE_BYTES) -> Any:
    """The message that `encode_tagged` made the text of; `MalformedValue` for one of none of these classes."""
    value = read_json(text, max_bytes)
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str) or value[0] not in classes:
        raise MalformedValue(f"{str(value)[:60]!r} is no message of version {PROTOCOL_VERSION} of the protocol")
    return from_plain(classes[value[0]], value[1])


def _bytes_as_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


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
    return typing.cast("_T", _read(kind, value))


def _read(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if kind is float and type(value) in (int, float) and abs(value) <= _MAX_INTEGER and math.isfinite(value):
        return float(value)
    if kind in _SCALARS and type(value) is kind and (kind is not int or abs(value) <= _MAX_INTEGER):
        return value
    if isinstance(kind, type) and isinstance(value, str) and issubclass(kind, enum.StrEnum | bytes):
        return _read_word(kind, value) if issubclass(kind, enum.StrEnum) else _read_bytes(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _read_dataclass(kind, value)
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(map(_read, kinds, value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {_read(str, name): _read(arguments[1], part) for name, part in value.items()}
    raise MalformedValue(f"{str(value)[:60]!r} is no {getattr(kind, '__name__', kind)}")


def _read_word(kind: type[enum.StrEnum], value: str) -> enum.StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise MalformedValue(f"{value[:60]!r} is no {kind.__name__}") from None


def _read_bytes(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise MalformedValue(f"{value[:60]!r} is no base64") from None


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _read_dataclass(kind: Any, value: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise MalformedValue(f"{kind.__name__} has no {str(min(map(str, unknown)))[:60]!r}")
    try:
        return kind(**{name: _read(hints[name], part) for name, part in value.items()})
    except TypeError as error:
        raise MalformedValue(f"{kind.__name__}: {error}") from None
