"""Converts dataclasses to plain JSON values and back, by tables of rules: `ValueWriter` and `ValueReader`.

Each use has its own tables of types and limits: `codec` for requests and answers, `live.codec` for the live protocol,
and `pollux.controller.codec` for events. The rule of a class is found or made once.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pollux.core.errors import PolluxError, choices
from pollux.wire._entry import MAX_DEPTH, MAX_INTEGER, path_text, shown

__all__ = [
    "SCALAR_READERS",
    "Misfit",
    "Reader",
    "ValueReader",
    "ValueWriter",
    "Writer",
    "as_it_is",
    "instead_of",
    "read_integer",
    "read_number",
    "read_text",
    "shown",
]

Reader = Callable[[Any], Any]
"""Converts a plain value; raises `Misfit`."""

Writer = Callable[[Any, int], Any]
"""Converts a value, given its depth, to a plain value; raises `Misfit`."""

Unwritten = Mapping[type, Iterable[str]]
"""Fields of dataclasses that are neither written nor read."""


_LARGEST = sys.float_info.max


class Misfit(Exception):
    """A value does not fit; each container around it appends its part to `path`, the innermost first."""

    def __init__(self, fault: str, *path: str | int) -> None:
        self.fault = fault
        self.path: list[str | int] = list(path)

    def message(self, where: str) -> str:
        """The error text: the source `where`, the path, and the fault with its remedy."""
        label = ": ".join(part for part in (where, path_text(reversed(self.path))) if part)
        return f"{label or 'the value'} {self.fault}"


def instead_of(value: object, wanted: str) -> Misfit:
    """The `Misfit` of a value; its remedy is to give `wanted`."""
    return Misfit(f"is {shown(value)}: give {wanted}")


def read_text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise instead_of(value, "a string")
    return value


def _read_boolean(value: Any) -> bool:
    """`true` or `false`."""
    if not isinstance(value, bool):
        raise instead_of(value, "true or false")
    return value


def read_integer(value: Any) -> int:
    """A whole number of at most 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise instead_of(value, "a whole number")
    if not -MAX_INTEGER <= value <= MAX_INTEGER:
        raise instead_of(value, "a whole number below 2^63")
    return int(value)


def read_number(value: Any) -> float:
    """A finite number."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise instead_of(value, "a number")
    # The comparison is exact even for whole numbers that no float can hold.
    if not -_LARGEST <= value <= _LARGEST:
        raise instead_of(value, "a finite number")
    return float(value)


def _read_nothing(value: Any) -> None:
    """`null`."""
    if value is not None:
        raise instead_of(value, "null")


SCALAR_READERS: Mapping[Any, Reader] = {
    str: read_text,
    bool: _read_boolean,
    int: read_integer,
    float: read_number,
    type(None): _read_nothing,
}
"""The common readers; each use replaces some by stricter or less strict ones."""


def as_it_is(value: Any, depth: int) -> Any:
    """The writer of values that are plain already."""
    return value


def _written_fields(kind: Any, unwritten: Unwritten) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init and field.name not in unwritten.get(kind, ())]


def _check_size(value: Any, max_items: int) -> None:
    if len(value) > max_items:
        raise Misfit(f"has {len(value)} items: give at most {max_items}")


def _field_name(key: object) -> str:
    return key if isinstance(key, str) else shown(key)


def _key(key: object, read: Reader) -> str:
    if not isinstance(key, str):
        raise Misfit(f"has the key {shown(key)}: give strings as keys")
    return typing.cast("str", read(key))


class ValueWriter(dict[type, Writer]):
    """Writes dataclasses, mappings, lists and tuples, and whatever `rules` has a writer for, at most 20 levels deep."""

    def __init__(
        self, rules: Mapping[type, Writer], max_items: int = sys.maxsize, unwritten: Unwritten | None = None
    ) -> None:
        super().__init__(rules)
        self._rules = rules
        self._max_items = max_items
        self._unwritten = unwritten or {}

    def __call__(self, value: object) -> Any:
        """The value as plain values."""
        return self[type(value)](value, 0)

    def __missing__(self, kind: type) -> Writer:
        found = next((writer for known, writer in self._rules.items() if issubclass(kind, known)), None)
        if found is None:
            found = self._container_writer(kind)
        self[kind] = found
        return found

    def _container_writer(self, kind: type) -> Writer:
        if dataclasses.is_dataclass(kind):
            return self._dataclass_writer([field.name for field in _written_fields(kind, self._unwritten)])
        if issubclass(kind, Mapping):
            return self._write_mapping
        if issubclass(kind, list | tuple):
            return self._write_items
        return _refuse_to_write

    def _dataclass_writer(self, names: list[str]) -> Writer:
        return lambda value, depth: self._write_fields([(name, getattr(value, name)) for name in names], depth)

    def _write_mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        _check_size(value, self._max_items)
        return self._write_fields([(_key(key, self), item) for key, item in value.items()], depth)

    def _write_fields(self, items: list[tuple[str, Any]], depth: int) -> dict[str, Any]:
        _check_depth(depth)
        found, depth = {}, depth + 1
        try:
            for name, item in items:
                found[name] = self[type(item)](item, depth)
        except Misfit as misfit:
            misfit.path.append(name)
            raise
        return found

    def _write_items(self, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        _check_depth(depth)
        _check_size(value, self._max_items)
        found: list[Any] = []
        try:
            for item in value:
                found.append(self[type(item)](item, depth + 1))
        except Misfit as misfit:
            misfit.path.append(len(found))
            raise
        return found


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Misfit(f"is nested too deeply: give at most {MAX_DEPTH} levels")


def _refuse_to_write(value: object, depth: int) -> Any:
    _check_depth(depth)
    raise instead_of(value, "what JSON has: a mapping, list, string, number, boolean or null")


class ValueReader:
    """Reads dataclasses, literals, enumerations of words, unions, tuples, lists, mappings and the types in `rules`.

    Strict: no unknown field, none missing that has no default, nothing of another type, at most `max_items` in one
    list or mapping. A dataclass that refuses its fields with a `PolluxError` is refused at its path.
    """

    def __init__(
        self, rules: Mapping[Any, Reader], max_items: int = sys.maxsize, unwritten: Unwritten | None = None
    ) -> None:
        self._readers = dict(rules)
        self._max_items = max_items
        self._unwritten = unwritten or {}

    def __call__(self, kind: Any, value: object) -> Any:
        """The value of that type from plain values."""
        return self.reader(kind)(value)

    def reader(self, kind: Any) -> Reader:
        """The reader of a type; TypeError for a type without a rule, which is a mistake in Pollux."""
        found = self._readers.get(kind)
        if found is None:
            found = self._readers[kind] = self._new_reader(kind)
        return found

    def _new_reader(self, kind: Any) -> Reader:
        if dataclasses.is_dataclass(kind):
            return self._dataclass_reader(typing.cast("type", kind))
        if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
            return _word_reader([(word.value, word) for word in kind])
        make = _READER_OF_ORIGIN.get(typing.get_origin(kind))
        if make is None:
            raise TypeError(f"the codec has no rule for {kind!r}")
        return make(self, typing.get_args(kind))

    def _literal_reader(self, words: tuple[Any, ...]) -> Reader:
        return _word_reader([(word, word) for word in words])

    def _union_reader(self, kinds: tuple[Any, ...]) -> Reader:
        readers = [self.reader(kind) for kind in kinds if kind is not type(None)]
        read = readers[0] if len(readers) == 1 else _first_that_fits(readers)
        return read if len(readers) == len(kinds) else lambda value: None if value is None else read(value)

    def _list_reader(self, kinds: tuple[Any, ...]) -> Reader:
        return self._items_reader(itertools.repeat(self.reader(kinds[0])), None, list)

    def _tuple_reader(self, kinds: tuple[Any, ...]) -> Reader:
        if kinds[-1] is Ellipsis:
            return self._items_reader(itertools.repeat(self.reader(kinds[0])), None, tuple)
        return self._items_reader([self.reader(kind) for kind in kinds], len(kinds), tuple)

    def _items_reader(self, readers: Iterable[Reader], count: int | None, make: Callable[[list[Any]], Any]) -> Reader:
        def read(value: Any) -> Any:
            if not isinstance(value, list | tuple) or count not in (None, len(value)):
                raise instead_of(value, "a list" if count is None else f"a list of {count}")
            _check_size(value, self._max_items)
            found: list[Any] = []
            try:
                for read_item, item in zip(readers, value, strict=False):
                    found.append(read_item(item))
            except Misfit as misfit:
                misfit.path.append(len(found))
                raise
            return make(found)

        return read

    def _mapping_reader(self, kinds: tuple[Any, ...]) -> Reader:
        if kinds[0] is not str:
            raise TypeError(f"the codec has no rule for keys of {kinds[0]!r}")
        read_key, read_item = self.reader(str), self.reader(kinds[1])

        def read(value: Any) -> dict[str, Any]:
            if not isinstance(value, Mapping):
                raise instead_of(value, "a mapping")
            _check_size(value, self._max_items)
            found = {}
            for key, item in value.items():
                name = _key(key, read_key)
                try:
                    found[name] = read_item(item)
                except Misfit as misfit:
                    misfit.path.append(name)
                    raise
            return found

        return read

    def _dataclass_reader(self, kind: type) -> Reader:
        hints, fields = typing.get_type_hints(kind), _written_fields(kind, self._unwritten)
        missing = (dataclasses.MISSING, dataclasses.MISSING)
        required = [field.name for field in fields if (field.default, field.default_factory) == missing]
        readers = {field.name: self.reader(hints[field.name]) for field in fields}

        def read(value: Any) -> Any:
            if not isinstance(value, Mapping):
                raise instead_of(value, "a mapping")
            found, key = {}, ""
            try:
                for key, item in value.items():
                    read_field = readers.get(key)
                    if read_field is None:
                        raise Misfit(f"is not known: {choices(_field_name(key)[:100], readers)}")
                    found[key] = read_field(item)
            except Misfit as misfit:
                misfit.path.append(_field_name(key))
                raise
            for name in required:
                if name not in found:
                    raise Misfit("is missing: give it", name)
            try:
                return kind(**found)
            except PolluxError as error:
                raise Misfit(f"does not fit: {error}") from None

        return read


_READER_OF_ORIGIN: Mapping[Any, Callable[[ValueReader, tuple[Any, ...]], Reader]] = {
    Literal: ValueReader._literal_reader,
    typing.Union: ValueReader._union_reader,
    types.UnionType: ValueReader._union_reader,
    tuple: ValueReader._tuple_reader,
    list: ValueReader._list_reader,
    dict: ValueReader._mapping_reader,
    Mapping: ValueReader._mapping_reader,
}


def _word_reader(words: list[tuple[Any, Any]]) -> Reader:
    """A reader of fixed words, each with its value."""

    def read(value: Any) -> Any:
        for written, word in words:
            if type(written) is type(value) and written == value:
                return word
        known = [str(written) for written, _ in words]
        raise Misfit(f"is {shown(value)}: {choices(value[:100] if isinstance(value, str) else '', known)}")

    return read


def _first_that_fits(readers: list[Reader]) -> Reader:
    def read(value: Any) -> Any:
        misfits = []
        for read_one in readers:
            try:
                return read_one(value)
            except Misfit as misfit:
                misfits.append(misfit)
        # The alternative that could read most of the value was probably meant.
        raise max(misfits, key=lambda misfit: len(misfit.path))

    return read
