"""Reads durations, sizes and GPU ranges as people write them, into seconds, bytes and bounds."""

from __future__ import annotations

import re
from typing import NoReturn

from pollux.core.errors import InvalidInput
from pollux.wire._entry import shown

__all__ = ["MAX_GPUS", "parse_duration", "parse_gpus", "parse_size"]

MAX_GPUS = 100_000
"""The most GPUs one job may ask for."""

_SECONDS = {"d": 86_400.0, "h": 3_600.0, "min": 60.0, "m": 60.0, "s": 1.0, "sec": 1.0}
_DURATION = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(d|h|min|m|sec|s)\s*", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kmgtp]?)(i?)(b?)", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,15}(?:\.\d{1,9})?", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:\s*(?:\.\.|:)\s*(\d{1,9}))?", re.ASCII)

_MAX_SECONDS = 3650 * 86_400.0
_MAX_BYTES = 2.0**60


def parse_duration(value: object, what: str = "duration", low: float = 0.0, high: float = _MAX_SECONDS) -> float:
    """Seconds of `90`, `90s`, `10min`, `24h`, `2d` or `1h30min`; a bare number is seconds.

    `what` names the value in errors; it must be from `low` to `high` seconds.
    """
    seconds = _plain(value)
    if seconds is None and isinstance(value, str):
        seconds = _sum_of_units(value.strip())
    if seconds is None:
        _refuse(value, what, "give seconds, or a time such as 90s, 10min, 24h, 2d or 1h30min")
    if not low <= seconds <= high:
        _refuse(value, what, f"give {_show_seconds(low)} to {_show_seconds(high)}")
    return seconds


def _sum_of_units(text: str) -> float | None:
    total, end, smallest = 0.0, 0, float("inf")
    for match in _DURATION.finditer(text):
        unit = _SECONDS[match.group(2).lower()]
        if match.start() != end or unit >= smallest:
            return None
        total, end, smallest = total + float(match.group(1)) * unit, match.end(), unit
    return total if end and end == len(text) else None


def _show_seconds(seconds: float) -> str:
    for unit in ("d", "h", "min"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def parse_size(value: object, what: str = "size") -> float:
    """Bytes of `16GiB` (powers of 1,024; also `16Gi`), `512MB` (powers of 1,000) or a bare number."""
    size = _plain(value)
    if size is None and isinstance(value, str):
        size = _bytes_with_unit(value.strip())
    if size is None:
        _refuse(value, what, "give bytes, or a size such as 16GiB or 512MB")
    if size > _MAX_BYTES:
        _refuse(value, what, "give at most 1024PiB")
    return size


def _bytes_with_unit(text: str) -> float | None:
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, prefix, binary, byte = match.groups()
    if not (byte or binary) or (binary and not prefix):
        return None
    return float(number) * (1024.0 if binary else 1000.0) ** " kmgtp".index(prefix.lower() or " ")


def parse_gpus(value: object, what: str = "gpus") -> tuple[int, int]:
    """The fewest and the most GPUs of `4`, `"1..16"`, `"1:16"` or `[1, 16]`: whole numbers from 1 to 100,000."""
    bounds = _bounds(value)
    remedy = "give a number such as 4, or a range such as 1..16"
    if bounds is None:
        _refuse(value, what, remedy)
    low, high = bounds
    seen = f"{low}..{high}" if isinstance(value, list | tuple) else value
    if low < 1 or high > MAX_GPUS:
        _refuse(seen, what, f"{remedy}, from 1 to {MAX_GPUS}")
    if low > high:
        _refuse(seen, what, f"the range ends below its start; did you mean {high}..{low}?")
    return low, high


def _bounds(value: object) -> tuple[int, int] | None:
    if isinstance(value, str):
        match = _RANGE.fullmatch(value.strip())
        return None if match is None else (int(match.group(1)), int(match.group(2) or match.group(1)))
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_whole, pair)):
        return None
    low, high = pair
    return (low, high) if max(abs(low), abs(high)) < 10**9 else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: object) -> float | None:
    """A bare number that is finite and not below 0, also as a string."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if 0 <= value < 1e18 else None
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else None


def _refuse(value: object, what: str, remedy: str) -> NoReturn:
    raise InvalidInput(f"{what} is {shown(value)}: {remedy}")
