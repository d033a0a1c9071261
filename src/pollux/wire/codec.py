"""Wire values to plain JSON values and back, strictly: nothing unknown, missing, of another type or without bounds.

Which values there are is in `job`, `report` and `status`; the spelling that people write is in `jobfile`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pollux.core.errors import InvalidInput, TooLarge, choices
from pollux.wire._entry import MAX_DEPTH, MAX_INTEGER, MAX_ITEMS, MAX_TEXT, path_text, shown, text_fault

__all__ = ["MAX_BODY_BYTES", "decode", "decode_json", "encode", "encode_json"]

MAX_BODY_BYTES = 1_048_576
"""The most that `decode_json` and the job file take at once."""

T = TypeVar("T")
Reader = Callable[[Any], Any]


def encode(value: object) -> Any:
    """The value as dicts, lists, strings, numbers, booleans and None, the same that `json.loads` would give.

    Nothing is dropped: None stays None. Refuses what JSON cannot hold, infinite numbers included; length has no limit.
    """
    return _guarded(functools.partial(_encode, value, 0), "")


def decode(kind: type[T], value: object, where: str = "") -> T:
    """The dataclass `kind` from the JSON value that `encode` made of it, or of a client's.

    Fields with a default may be missing; lists become tuples; whole numbers are taken for floats. All else that
    does not fit is refused with its path; `where` names the source at the beginning of the message.
    """
    return typing.cast("T", _guarded(functools.partial(_reader(typing.cast("Any", kind)), value), where))


def encode_json(value: object) -> str:
    """`encode` as JSON on one line."""
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode_json(text: bytes | str, where: str = "") -> Any:
    """The JSON value of a body or file: UTF-8, no key twice, no NaN, at most `MAX_BODY_BYTES`."""
    if len(text) > MAX_BODY_BYTES:
        raise TooLarge(f"{where or 'the body'} has {len(text)} bytes: give at most {MAX_BODY_BYTES}")
    return _guarded(functools.partial(_parse_json, text), where or "the body")


def _parse_json(text: bytes | str) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _Refusal(f"has byte {error.start} that is not UTF-8: send UTF-8") from error
    except json.JSONDecodeError as error:
        raise _Refusal(f"is not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise _Refusal(f"is nested too deeply: give at most {MAX_DEPTH} levels") from error
    except ValueError as error:
        # Python refuses to read whole numbers of thousands of digits.
        raise _Refusal("has a number that is too long: give whole numbers below 2^63") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Refusal(f"has the key {shown(key)} twice: give it once")
        found[key] = value
    return found


def _no_constant(name: str) -> float:
    raise _Refusal(f"holds {name}: give a finite number, or null for an unknown one")


class _Refusal(Exception):
    """Something does not fit; `path` is filled from the inside out on the way up."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.path: list[str | int] = []


def _guarded(work: Callable[[], Any], where: str) -> Any:
    try:
        return work()
    except _Refusal as refusal:
        label = ": ".join(part for part in (where, path_text(reversed(refusal.path))) if part)
        raise InvalidInput(f"{label or 'the value'} {refusal.fault}") from None


def _instead_of(value: object, wanted: str) -> _Refusal:
    return _Refusal(f"is {shown(value)}: give {wanted}")


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _encode(value: object, depth: int, is_input: bool = False) -> Any:
    """Plain JSON values; only input is limited in length, for what we hold ourselves must come out."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(str(value), is_input)
    if isinstance(value, int):
        return _integer(int(value))
    if isinstance(value, float):
        return _number(float(value))
    if depth >= MAX_DEPTH:
        raise _Refusal(f"is nested too deeply: give at most {MAX_DEPTH} levels")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _field_names(type(value))
        return {name: _inside(_encode, name, getattr(value, name), depth + 1, is_input) for name in names}
    if is_input and isinstance(value, Mapping | list | tuple):
        _check_size(value)
    if isinstance(value, Mapping):
        return {_key(key, is_input): _inside(_encode, key, item, depth + 1, is_input) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inside(_encode, index, item, depth + 1, is_input) for index, item in enumerate(value)]
    raise _instead_of(value, "what JSON has: a mapping, list, string, number, boolean or null")


def _inside(read: Callable[..., Any], part: str | int, *arguments: Any) -> Any:
    try:
        return read(*arguments)
    except _Refusal as refusal:
        refusal.path.append(part)
        raise


def _check_size(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> None:
    if len(value) > MAX_ITEMS:
        raise _Refusal(f"has {len(value)} items: give at most {MAX_ITEMS}")


def _key(key: object, is_input: bool = True) -> str:
    if not isinstance(key, str):
        raise _Refusal(f"has the key {shown(key)}: give strings as keys")
    return _text(key, is_input)


def _text(value: object, is_input: bool = True) -> str:
    if not isinstance(value, str):
        raise _instead_of(value, "a string")
    fault = text_fault(value, MAX_TEXT if is_input else len(value))
    if fault is not None:
        raise _Refusal(f"is {shown(value)}: {fault}")
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _instead_of(value, "a whole number")
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise _instead_of(value, "a whole number below 2^63")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _instead_of(value, "a number")
    # The comparison is exact for whole numbers too long for a float.
    if not -1.7976931348623157e308 <= value <= 1.7976931348623157e308 or not math.isfinite(value):
        raise _instead_of(value, "a finite number")
    return float(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise _instead_of(value, "true or false")
    return value


def _nothing(value: object) -> None:
    if value is not None:
        raise _instead_of(value, "null")


def _anything(value: object) -> Any:
    return _encode(value, 0, is_input=True)


_SCALARS: Mapping[Any, Reader] = {
    str: _text,
    int: _integer,
    float: _number,
    bool: _boolean,
    type(None): _nothing,
    None: _nothing,
    Any: _anything,
    object: _anything,
}


@functools.cache
def _reader(kind: Any) -> Reader:
    """The function that checks a JSON value against a type; made once for each type."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast("type", kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return functools.partial(_one_of, arguments)
    if origin is typing.Union or origin is types.UnionType:
        return _union_reader(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return functools.partial(_items, _reader(arguments[0]), tuple)
    if origin is list:
        return functools.partial(_items, _reader(arguments[0]), list)
    if isinstance(origin, type) and issubclass(origin, Mapping) and arguments[0] is str:
        return functools.partial(_mapping, _reader(arguments[1]))
    raise TypeError(f"the codec has no rule for {kind!r}")


def _one_of(options: tuple[Any, ...], value: object) -> Any:
    for option in options:
        if type(option) is type(value) and option == value:
            return option
    known = [str(option) for option in options]
    raise _Refusal(f"is {shown(value)}: {choices(value[:100] if isinstance(value, str) else '', known)}")


def _union_reader(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds if kind is not type(None)]
    optional = len(readers) < len(kinds)
    if len(readers) == 1:
        return functools.partial(_optional, readers[0])
    return functools.partial(_either, readers, optional)


def _optional(read: Reader, value: object) -> Any:
    return None if value is None else read(value)


def _either(readers: list[Reader], optional: bool, value: object) -> Any:
    if value is None and optional:
        return None
    refusals = []
    for read in readers:
        try:
            return read(value)
        except _Refusal as refusal:
            refusals.append(refusal)
    # The alternative that went furthest into the value is the one that was meant.
    raise max(refusals, key=lambda refusal: len(refusal.path))


def _items(read: Reader, make: Callable[[list[Any]], Any], value: object) -> Any:
    if not isinstance(value, list | tuple):
        raise _instead_of(value, "a list")
    _check_size(value)
    return make([_inside(read, index, item) for index, item in enumerate(value)])


def _mapping(read: Reader, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _instead_of(value, "a mapping")
    _check_size(value)
    return {_key(key): _inside(read, key, item) for key, item in value.items()}


def _dataclass_reader(kind: type) -> Reader:
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = (dataclasses.MISSING, dataclasses.MISSING)
    required = [field.name for field in fields if (field.default, field.default_factory) == missing]
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    return functools.partial(_dataclass, kind, readers, required)


def _dataclass(kind: type, readers: Mapping[str, Reader], required: list[str], value: object) -> Any:
    if not isinstance(value, Mapping):
        raise _instead_of(value, "a mapping")
    found = {}
    for key, item in value.items():
        read = readers.get(key) if isinstance(key, str) else None
        if read is None:
            name = key if isinstance(key, str) else shown(key)
            raise _at(name, _Refusal(f"is not known: {choices(name[:100], readers)}"))
        found[key] = _inside(read, key, item)
    for name in required:
        if name not in found:
            raise _at(name, _Refusal("is missing: give it"))
    return kind(**found)


def _at(part: str, refusal: _Refusal) -> _Refusal:
    refusal.path.append(part)
    return refusal
