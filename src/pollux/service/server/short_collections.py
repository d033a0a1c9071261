"""Short garbage collections: with thousands of jobs a full one takes 50 ms, in which nothing is answered."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["short_collections"]

# Cycles among objects that live long are rare: they are looked for this often.
_THOROUGH_SECONDS = 3600.0


@contextlib.contextmanager
def short_collections(
    collector: Any = gc, clock: Callable[[], float] = time.monotonic, every_seconds: float = _THOROUGH_SECONDS
) -> Iterator[None]:
    """Have full collections look only at what is new since the last one; once an hour at everything.

    Jobs, views and caches survive a full collection, and the next one would find them alive again.
    """
    thorough_at = clock() + every_seconds

    def collecting(phase: str, about: dict[str, int]) -> None:
        nonlocal thorough_at
        if about["generation"] < 2:
            return
        if phase == "stop":
            collector.freeze()
        elif clock() >= thorough_at:
            thorough_at = clock() + every_seconds
            collector.unfreeze()

    collector.callbacks.append(collecting)
    try:
        yield
    finally:
        collector.callbacks.remove(collecting)
        collector.unfreeze()
