"""How times, shares and rates are written for people."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["clock", "compact", "duration", "eta_range", "moment", "share", "since"]

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def duration(seconds: float) -> str:
    """Seconds in at most two units: `45s`, `12min`, `1h 20min`, `2d 3h`."""
    whole = max(0, round(seconds))
    for position, (size, unit) in enumerate(_UNITS):
        if whole < size:
            continue
        count, rest = divmod(whole, size)
        if position + 1 < len(_UNITS) and count < 10:
            smaller, name = _UNITS[position + 1]
            if rest // smaller:
                return f"{count}{unit} {rest // smaller}{name}"
        return f"{count}{unit}"
    return f"{whole}s"


def clock(at: float, now: float) -> str:
    """A time of day, with the date unless it is today."""
    then = time.localtime(at)
    same_day = then[:3] == time.localtime(now)[:3]
    return time.strftime("%H:%M:%S" if same_day else "%b %d %H:%M", then)


def moment(at: float | None, now: float) -> str:
    """A time of day and how long ago, or a dash."""
    return "–" if at is None else f"{clock(at, now)} ({since(at, now)})"


def since(at: float, now: float) -> str:
    """The time between a moment and now, as `5min ago` or `in 5min`."""
    return f"{duration(now - at)} ago" if at <= now else f"in {duration(at - now)}"


def share(value: float | None) -> str:
    """A share as a percentage; only a whole is shown as 100%."""
    if value is None:
        return "–"
    return f"{min(99, int(value * 100)) if value < 1 else 100}%"


def compact(value: float | None) -> str:
    """A rate or count in about four characters: `0.42`, `87.1`, `1,240`, `38k`."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1e7:
        return f"{value / 1e6:.0f}M"
    if size >= 1e4:
        return f"{value / 1e3:.0f}k"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def eta_range(job: Mapping[str, Any], now: float) -> str:
    """How long until a job is expected to end, as an interval from now; a dash if unknown."""
    eta = job.get("eta")
    if not eta:
        return "–"
    low, high = duration(eta["low"] - now), duration(eta["high"] - now)
    return low if low == high else f"{low}–{high}"
