"""Reads CSV files of users; every error names file, line, field, value and remedy."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pollux.core import InvalidInput

__all__ = ["Row", "number", "read_rows", "text", "whole"]


class Row:
    """One line of a CSV file, with its place for errors."""

    __slots__ = ("_values", "line", "path")

    def __init__(self, path: Path, line: int, values: Mapping[str, str | None]) -> None:
        self.path, self.line, self._values = path, line, values

    def get(self, field: str, parse: Callable[[str], Any], remedy: str) -> Any:
        """The parsed value of a field; InvalidInput with the place if parsing fails."""
        raw = self._values.get(field)
        if raw is None or raw.strip() == "":
            raise self.error(field, "" if raw is None else raw, f"is missing; {remedy}")
        try:
            return parse(raw.strip())
        except ValueError:
            raise self.error(field, raw, remedy) from None

    def error(self, field: str, value: object, remedy: str) -> InvalidInput:
        """An error about one field of this line."""
        return InvalidInput(f"{self.path}, line {self.line}, field '{field}': '{value}': {remedy}")


def read_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """Rows of a CSV file that must have these columns (others are ignored)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            missing = [field for field in fields if field not in header]
            if missing:
                raise InvalidInput(
                    f"{path}, line 1, field '{missing[0]}': column is missing, the header has "
                    f"'{','.join(header)}': add it (needed: {','.join(fields)})"
                )
            for values in reader:
                yield Row(path, reader.line_num, values)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise InvalidInput(f"{path}: is a folder; give a CSV file") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path}: cannot be read as CSV ({error}); give a comma-separated UTF-8 file") from None


def number(row: Row, field: str, *, minimum: float = 0.0, above: bool = False) -> float:
    """A finite number, at least (or above) `minimum`."""
    bound = f"above {minimum:g}" if above else f"{minimum:g} or more"
    remedy = f"give a finite number, {bound}"
    value: float = row.get(field, float, remedy)
    if not math.isfinite(value) or value < minimum or (above and value == minimum):
        raise row.error(field, f"{value:g}", remedy)
    return value


def whole(row: Row, field: str, *, minimum: int = 0) -> int:
    """A whole number, at least `minimum`."""
    remedy = f"give a whole number, {minimum} or more"
    value: float = row.get(field, float, remedy)
    if not math.isfinite(value) or value != int(value) or value < minimum:
        raise row.error(field, f"{value:g}", remedy)
    return int(value)


def text(row: Row, field: str) -> str:
    """A word that is not empty."""
    value: str = row.get(field, str, "give a word")
    return value
