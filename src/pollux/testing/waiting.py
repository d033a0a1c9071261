"""Waiting in tests, and the error for waits that took too long: only tests that end with it are tried again.

Wrong data, states or answers are never an `OutOfTime`, so that they stay failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE_SECONDS", "OutOfTime", "wait_until"]

PATIENCE_SECONDS = 300.0
"""How long a test waits before it fails. A long limit costs nothing, since a wait ends with its condition; with a short
one, a slow disk, a busy core or a late import looks like a fault."""

_Found = TypeVar("_Found")


class OutOfTime(AssertionError):
    """A wait took too long; on a busy machine that may say nothing about the code."""


def wait_until(
    what: str,
    look: Callable[[], _Found],
    seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = 0.02,
    story: Callable[[], object] | None = None,
) -> _Found:
    """The first true value of `look`, called again and again; after `seconds`, `OutOfTime` with the text of `story`."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            told = "" if story is None else f"\n{story()}"
            raise OutOfTime(f"no {what} after {seconds:g} s{told}")
        time.sleep(pause_seconds)
    return found
