"""Converts requests and answers to plain JSON values and back; refuses unknown, missing, wrong and oversized values.

The classes are in `job`, `report` and `status`; `jobfile` reads the spelling that people write.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pollux.core.errors import InvalidInput, TooLarge
from pollux.wire._entry import MAX_DEPTH, MAX_ITEMS, shown, text_fault
from pollux.wire.dataclass_codec import (
    SCALAR_READERS,
    Misfit,
    ValueReader,
    ValueWriter,
    Writer,
    as_it_is,
    read_integer,
    read_number,
    read_text,
)

__all__ = ["MAX_BODY_BYTES", "decode", "decode_json", "encode", "encode_json"]

MAX_BODY_BYTES = 1_048_576
"""The largest body for `decode_json`, and the largest job file."""

T = TypeVar("T")


def encode(value: object) -> Any:
    """The value as dicts, lists, strings, numbers, booleans and None, as `json.loads` would return it.

    None stays None. Refuses what JSON cannot hold, such as infinite numbers; has no limit of length.
    """
    try:
        return _write(value)
    except Misfit as misfit:
        raise InvalidInput(misfit.message("")) from None


def decode(kind: type[T], value: object, where: str = "") -> T:
    """The dataclass `kind` from a JSON value of `encode`, or of a client.

    Fields with a default may be missing, lists become tuples, and whole numbers become floats. Any other difference is
    refused with its path; errors begin with `where`, the name of the source.
    """
    try:
        return typing.cast("T", _read(kind, value))
    except Misfit as misfit:
        raise InvalidInput(misfit.message(where)) from None


def encode_json(value: object) -> str:
    """`encode` as JSON on one line."""
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode_json(text: bytes | str, where: str = "") -> Any:
    """The JSON value of a body or file: UTF-8, without repeated keys and NaN, at most `MAX_BODY_BYTES`."""
    if len(text) > MAX_BODY_BYTES:
        raise TooLarge(f"{where or 'the body'} has {len(text)} bytes: give at most {MAX_BODY_BYTES}")
    try:
        return _parse_json(text)
    except Misfit as misfit:
        raise InvalidInput(misfit.message(where or "the body")) from None


def _parse_json(text: bytes | str) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Misfit(f"has byte {error.start} that is not UTF-8: send UTF-8") from error
    except json.JSONDecodeError as error:
        raise Misfit(f"is not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise Misfit(f"is nested too deeply: give at most {MAX_DEPTH} levels") from error
    except ValueError as error:
        # Python refuses to read whole numbers of thousands of digits.
        raise Misfit("has a number that is too long: give whole numbers below 2^63") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Misfit(f"has the key {shown(key)} twice: give it once")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise Misfit(f"holds {name}: give a finite number, or null for an unknown one")


def _read_text(value: Any) -> str:
    """A string of a client, of limited length."""
    fault = text_fault(read_text(value))
    if fault is not None:
        raise Misfit(f"is {shown(value)}: {fault}")
    return str(value)


def _write_text(value: str, depth: int) -> str:
    """A string of the service, of any length."""
    fault = text_fault(value, len(value))
    if fault is not None:
        raise Misfit(f"is {shown(value)}: {fault}")
    return str(value)


_WRITERS: Mapping[type, Writer] = {
    type(None): as_it_is,
    bool: as_it_is,
    str: _write_text,
    int: lambda value, depth: read_integer(value),
    float: lambda value, depth: read_number(value),
}
_write = ValueWriter(_WRITERS)
_check_input = ValueWriter({**_WRITERS, str: lambda value, depth: _read_text(value)}, MAX_ITEMS)
_read = ValueReader({**SCALAR_READERS, str: _read_text, Any: _check_input, object: _check_input}, MAX_ITEMS)
