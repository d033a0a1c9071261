"""Reads one YAML 1.2 document as plain values with their lines; refuses tags, anchors and repeated keys; has limits.

Values are built from the parser's events, without recursion and without constructing objects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pollux.core.errors import InvalidInput
from pollux.wire._entry import MAX_DEPTH, MAX_ITEMS, Origin, Path, shown

_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}")
_OCTAL = re.compile(r"0o[0-7]{1,4000}")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,4000}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_NO_KEY = object()


def read_yaml(text: str, name: str) -> tuple[Any, Origin]:
    """The value of the document in `text`, and the place of each part; `name` is the file's name."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    document = _Document(name)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            document.add_event(event)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise InvalidInput(f"{name} line {line}: not YAML: {_one_line(error.problem or error.context)}") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidInput(f"{name} line {line}: character {shown(chr(error.character))} is not allowed") from error
    except YAMLError as error:
        raise InvalidInput(f"{name}: not YAML: {_one_line(str(error))}") from error
    except (ArithmeticError, LookupError, ValueError) as error:
        # The parser raises these for some damaged documents, such as escapes beyond Unicode.
        raise InvalidInput(f"{name}: not YAML: {_one_line(str(error)) or 'it cannot be read'}") from error
    return document.value, Origin(name, document.lines, document.spellings)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:200]


def _scalar(text: str) -> Any:
    """A plain scalar by the core schema of YAML 1.2, in which `yes`, `010` and `1:16` differ from 1.1."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    return float(text) if _FLOAT.fullmatch(text) else text


def _joined(text: str) -> str:
    """The text with surrogate pairs joined: JSON files, which are read here too, escape characters as pairs."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


@dataclass(slots=True)
class _Open:
    """A mapping or list that has not ended; `key` is the key whose value comes next."""

    container: dict[str, Any] | list[Any]
    path: Path
    key: Any = _NO_KEY


@dataclass(slots=True)
class _Document:
    name: str
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    spellings: dict[Path, str] = field(default_factory=dict)
    _open: list[_Open] = field(default_factory=list)
    _documents: int = 0

    def add_event(self, event: Any) -> None:
        line = event.start_mark.line + 1
        kind = type(event).__name__
        if kind == "DocumentStartEvent":
            self._start(event, line)
        elif kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            self._refuse(line, "anchors (&) and aliases (*) are not allowed: write the value out")
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self._check_tag(event, line, {"map", "seq"})
            self._begin({} if kind == "MappingStartEvent" else [], line)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            self._open.pop()
        elif kind == "ScalarEvent":
            self._add_scalar(event, line)

    def _start(self, event: Any, line: int) -> None:
        self._documents += 1
        if self._documents > 1:
            self._refuse(line, "a second document begins: give one job in each file")
        if event.version is not None and tuple(event.version) != (1, 2):
            self._refuse(line, "this is read as YAML 1.2: take the %YAML line out")

    def _add_scalar(self, event: Any, line: int) -> None:
        self._check_tag(event, line, {"str"})
        plain = event.style in (None, "") and event.tag is None
        top = self._open[-1] if self._open else None
        if top is not None and isinstance(top.container, dict) and top.key is _NO_KEY:
            self._add_key(top, _joined(event.value), line)
            return
        path = self._put(_scalar(event.value) if plain else _joined(event.value), line)
        if plain:
            self.spellings[path] = event.value

    def _add_key(self, top: _Open, key: str, line: int) -> None:
        if key in top.container:
            first = self.lines[(*top.path, key)]
            self._refuse(line, f"key {shown(key)} is given twice, first in line {first}: give it once")
        self.lines[(*top.path, key)] = line
        top.key = key

    def _begin(self, container: dict[str, Any] | list[Any], line: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            self._refuse(line, f"it is nested too deeply: give at most {MAX_DEPTH} levels")
        self._open.append(_Open(container, self._put(container, line)))

    def _put(self, value: Any, line: int) -> Path:
        """Store the value in the open container; returns its path."""
        if not self._open:
            self.value = value
            return ()
        top = self._open[-1]
        if len(top.container) >= MAX_ITEMS:
            self._refuse(line, f"more than {MAX_ITEMS} items: give fewer")
        if isinstance(top.container, list):
            top.container.append(value)
            path = (*top.path, len(top.container) - 1)
            self.lines[path] = line
            return path
        if top.key is _NO_KEY:
            self._refuse(line, "a list or mapping stands as a key: give words as keys")
        top.container[top.key] = value
        path, top.key = (*top.path, top.key), _NO_KEY
        return path

    def _check_tag(self, event: Any, line: int, taken: set[str]) -> None:
        tag = None if event.tag is None else str(event.tag)
        if tag is not None and tag != "!" and tag.removeprefix("tag:yaml.org,2002:") not in taken:
            self._refuse(line, f"the tag {shown(tag)} is not allowed: give the plain value")

    def _refuse(self, line: int, fault: str) -> NoReturn:
        raise InvalidInput(f"{self.name} line {line}: {fault}")
