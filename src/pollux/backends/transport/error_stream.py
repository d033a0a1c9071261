"""Writes lines to the error stream of a process, which may be a log on a full disk."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Write a line if the stream takes one: a log that cannot be written must not change what a process does."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
