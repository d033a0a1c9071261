"""Options of a backend on the command line: `--option NAME=VALUE`, read as the backend's class declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.core.errors import InvalidInput, choices

__all__ = ["option_words", "preview", "read_options"]

_NOT_HERE = {"home": "--home", "slots": "--slots"}
_TRUE, _FALSE = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def read_options(backend: str, words: Sequence[str]) -> dict[str, Any]:
    """The options of a backend from `NAME=VALUE` words; InvalidInput for an unknown name or a wrong value."""
    import pollux.backends as backends

    declared = backends.option_kinds(backend)
    known = [name for name in declared if name not in _NOT_HERE]
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise InvalidInput(f"--option is '{word}': give NAME=VALUE, such as partition=gpu")
        if name in _NOT_HERE and name in declared:
            raise InvalidInput(
                f"--option '{name}' is an option of 'pollux up' itself: give {_NOT_HERE[name]} {value or 'VALUE'}"
            )
        if name not in known:
            what = choices(name, known) if known else "it has none"
            raise InvalidInput(f"backend '{backend}' has no option '{name}': {what}")
        given[name] = _value(name, value, declared[name])
    return given


def _value(name: str, text: str, declared: str) -> Any:
    kinds = [kind.strip() for kind in declared.split("|")]
    try:
        if "bool" in kinds:
            return _yes(text)
        if "int" in kinds:
            return int(text)
        if "float" in kinds:
            return float(text)
    except ValueError:
        kind = "yes or no" if "bool" in kinds else "a whole number" if "int" in kinds else "a number"
        raise InvalidInput(f"--option {name} is '{text}': give {kind}") from None
    return Path(text) if "Path" in kinds else text


def _yes(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """The `--option` words for these options."""
    words: list[str] = []
    for name, value in options.items():
        if name not in _NOT_HERE:
            words += ["--option", f"{name}={value}"]
    return words


def preview(backend: str, home: Path, options: Mapping[str, Any]) -> str:
    """The requests that a backend would send to its engine, as text; sends nothing."""
    import pollux.backends as backends

    shown = str(backends.load(backend).preview(home, **options))
    return shown or f"backend '{backend}' asks no engine for anything\n"
