"""Waiting in tests, with one error for what did not come about in time: the only kind of failure that is tried again.

What came out wrong (data, a state, an answer) is never an `OutOfTime`, so that it stays a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE_SECONDS", "OutOfTime", "wait_until"]

PATIENCE_SECONDS = 300.0
"""How long a test waits for what is to come. A wait ends with what it waits for, so a long one costs nothing, and a
short one makes a slow disk, a busy core or a late import look like a fault."""

_Found = TypeVar("_Found")


class OutOfTime(AssertionError):
    """What was waited for did not come about in time; on a busy machine that may say nothing about the code."""


def wait_until(
    what: str,
    look: Callable[[], _Found],
    seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = 0.02,
    story: Callable[[], object] | None = None,
) -> _Found:
    """What `look` gives, once it gives something; `OutOfTime` after `seconds`, with all that `story` has to tell."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            told = "" if story is None else f"\n{story()}"
            raise OutOfTime(f"no {what} after {seconds:g} s{told}")
        time.sleep(pause_seconds)
    return found
