"""A value of a job file or a request with its place, so that every error names place, value and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pollux.core.errors import InvalidInput, choices

Path = tuple[str | int, ...]

MAX_TEXT = 65_536
MAX_ITEMS = 10_000
MAX_DEPTH = 20
MAX_INTEGER = 2**63 - 1

_SHOWN_CHARACTERS = 60
_JSON_WORDS = {None: "null", True: "true", False: "false"}
_NOWHERE: Mapping[str, str] = {}


def shown(value: object) -> str:
    """A value as errors show it: always short, and never an error itself."""
    if value is None or isinstance(value, bool):
        return _JSON_WORDS[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]!r}…"
    if isinstance(value, int):
        # Python refuses to write out very long numbers.
        return str(value) if abs(value) <= MAX_INTEGER else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"


def path_text(path: Iterable[str | int]) -> str:
    """The path in the usual spelling, such as `model.parameters[2]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() and len(part) <= _SHOWN_CHARACTERS else shown(part)
            text += f".{name}" if text else name
    return text


def text_fault(value: str, longest: int = MAX_TEXT) -> str | None:
    """The remedy for a string that is too long or not UTF-8; None if it is fine."""
    if len(value) > longest:
        return f"give at most {longest} characters, these are {len(value)}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "give text that can be written as UTF-8"
    return None


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of values: its name, and for files the lines and the spellings of plain scalars."""

    name: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    spellings: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """A value at a path of its origin. The methods for each type return the checked value, or raise InvalidInput."""

    value: Any
    origin: Origin
    path: Path = ()

    @property
    def label(self) -> str:
        """Place and key, with which every error begins: `job.yaml line 3: gpus`."""
        line = self.origin.lines.get(self.path)
        place = f"{self.origin.name} line {line}" if line is not None else self.origin.name
        return ": ".join(part for part in (place, path_text(self.path)) if part)

    @property
    def spelling(self) -> str | None:
        """A plain scalar as the file spells it; None if it was quoted, or is not from a file."""
        return self.origin.spellings.get(self.path)

    def refuse(self, remedy: str) -> NoReturn:
        """Raise the error for this value."""
        if self.value is None:
            raise InvalidInput(f"{self.label} is empty: {remedy}, or leave the key out")
        raise InvalidInput(f"{self.label} is {shown(self.value)}: {remedy}")

    def at(self, key: str | int) -> Entry:
        """The value below this one."""
        return Entry(self.value[key], self.origin, (*self.path, key))

    def keys(self, known: Iterable[str], remedy: str, elsewhere: Mapping[str, str] = _NOWHERE) -> list[str]:
        """The keys of a mapping, which must be `known`; `elsewhere` says where misplaced keys belong."""
        if not isinstance(self.value, Mapping):
            self.refuse(remedy)
        known = list(known)
        for key in self.value:
            if key not in known:
                below = Entry(None, self.origin, (*self.path, key if isinstance(key, str) else shown(key)))
                hint = elsewhere.get(key) or choices(str(below.path[-1])[:100], known)
                raise InvalidInput(f"{below.label} is not a key here: {hint}")
        return list(self.value)

    def text(self, remedy: str) -> str:
        """A string that is not blank and has no NUL."""
        if not isinstance(self.value, str) or not self.value.strip() or "\0" in self.value:
            self.refuse(remedy)
        fault = text_fault(self.value)
        if fault is not None:
            self.refuse(fault)
        return self.value

    def word(self, remedy: str) -> str:
        """A string, or a number or boolean as a string, in its spelling in the file."""
        text = self.value
        if text is not None and self.spelling is not None:
            text = self.spelling
        elif isinstance(text, bool):
            text = shown(text)
        elif isinstance(text, int):
            text = str(self.integer(-MAX_INTEGER, MAX_INTEGER, remedy))
        elif isinstance(text, float) and math.isfinite(text):
            text = str(text)
        if not isinstance(text, str) or "\0" in text:
            self.refuse(remedy)
        fault = text_fault(text)
        return text if fault is None else self.refuse(fault)

    def integer(self, low: int, high: int, remedy: str) -> int:
        """A whole number from `low` to `high`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            self.refuse(remedy)
        return self.value

    def number(self, low: float, high: float, remedy: str) -> float:
        """A number from `low` to `high`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not low <= self.value <= high:
            self.refuse(remedy)
        return float(self.value)

    def boolean(self, remedy: str) -> bool:
        """`true` or `false`."""
        return self.value if isinstance(self.value, bool) else self.refuse(remedy)

    def items(self, remedy: str) -> list[Entry]:
        """The items of a list."""
        if not isinstance(self.value, list | tuple):
            self.refuse(remedy)
        if len(self.value) > MAX_ITEMS:
            raise InvalidInput(f"{self.label} has {len(self.value)} items: give at most {MAX_ITEMS}")
        return [self.at(index) for index in range(len(self.value))]

    def one_or_more(self, remedy: str) -> list[Entry]:
        """The items of a list, or the value itself if it is a string."""
        return [self] if isinstance(self.value, str) else self.items(remedy)
