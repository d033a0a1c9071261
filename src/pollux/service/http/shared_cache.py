"""Answers that many ask for and that take a while: each is made once, in another thread, and kept for a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["SharedCache"]

_MOST_KEYS = 32


@dataclass(slots=True)
class _Entry:
    answer: asyncio.Future[bytes]
    made_at: float


class SharedCache:
    """Answers by key. For one event loop; a caller that comes while an answer is being made waits for it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._entries: dict[Hashable, _Entry] = {}

    async def get(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """The answer for a key, not older than the seconds given; `make` is called in a thread."""
        entry = self._entries.get(key)
        if entry is None or (entry.answer.done() and self._clock() - entry.made_at > self._seconds):
            entry = _Entry(asyncio.ensure_future(asyncio.to_thread(make)), self._clock())
            entry.answer.add_done_callback(lambda done: self._drop_if_failed(key, done))
            self._entries.pop(key, None)
            self._entries[key] = entry
            while len(self._entries) > _MOST_KEYS:
                self._entries.pop(next(iter(self._entries)))
        return await asyncio.shield(entry.answer)

    def _drop_if_failed(self, key: Hashable, done: asyncio.Future[bytes]) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.answer is done:
            if done.cancelled() or done.exception() is not None:
                del self._entries[key]
            else:
                entry.made_at = self._clock()
