"""Server-sent events: answers without an end, with a bounded queue for each reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pollux.core.errors import InvalidInput
from pollux.service.auth.sessions import Sessions
from pollux.service.engine.engine import Engine
from pollux.service.views.job_events import Feed, message

__all__ = ["SignIn", "event_stream", "resume_point"]

_KEEP_ALIVE_SECONDS = 15.0
_MOST_WAITING = 1024
_MOST_REREAD = 20_000
# Each piece costs a send for each listener: with many listeners, pieces come a little later and are fewer.
_FEW_LISTENERS = 8
_SECONDS_PER_LISTENER = 0.002
_LONGEST_GATHERING_SECONDS = 0.5
_RESYNC = b'event: resync\ndata: {"text": "events before this were dropped from the log; list the jobs again"}\n\n'


@dataclass(frozen=True, slots=True)
class SignIn:
    """The session of the browser that reads a stream: the stream ends with it."""

    sessions: Sessions
    session_id: str

    @property
    def holds(self) -> bool:
        """Whether the session is still valid: not signed out, not too old."""
        return self.sessions.find(self.session_id) is not None

    def watch(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call `tell` once the session is ended; the returned function ends the watch."""
        return self.sessions.watch(self.session_id, tell)


def resume_point(header: str | None) -> int | None:
    """The revision after which a client wants to go on; None: from now on."""
    if header is None:
        return None
    if not (header.isascii() and header.isdigit() and len(header) <= 18):
        raise InvalidInput(f"Last-Event-ID is '{header[:80]}'; send back the id of the last message, a whole number")
    return int(header)


async def event_stream(
    engine: Engine, after: int | None, follow: bool, sign_in: SignIn | None = None
) -> AsyncIterator[bytes]:
    """Messages after a revision, then new ones as they happen.

    Ends when its reader falls far behind, and with the session that it was opened with.
    """
    subscription = _Subscription(engine.views.feed, after, sign_in)
    try:
        yield b": hello\n\n"
        missed = subscription.missed
        if missed is None:
            missed = await asyncio.to_thread(_reread, engine, after or 0)
        for text in missed:
            yield text
        while follow and subscription.holds:
            for piece in await subscription.next_pieces():
                if piece is None or not subscription.holds:
                    return
                yield piece
    finally:
        subscription.close()


class _Subscription:
    """The messages that wait for one reader. The feed and the sessions add to them from any thread.

    `missed` are the messages since the revision that the reader has seen; None if only the log has them.
    """

    def __init__(self, feed: Feed, after: int | None, sign_in: SignIn | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._feed = feed
        self._sign_in = sign_in
        self._unwatch = None if sign_in is None else sign_in.watch(self._end)
        self._number, self.missed = feed.subscribe(self._add, after)

    @property
    def holds(self) -> bool:
        """Whether the reader may get more events: its session has not been ended."""
        return self._sign_in is None or self._sign_in.holds

    def close(self) -> None:
        """Add nothing more."""
        if self._unwatch is not None:
            self._unwatch()
        self._feed.unsubscribe(self._number)

    async def next_pieces(self) -> list[bytes | None]:
        """Wait for a message; returns all that come within a moment as one piece. None at the end: the stream is over.

        The more people watch, the longer the moment. After a long silence, returns a keep-alive.
        """
        try:
            first = await asyncio.wait_for(self._waiting.get(), _KEEP_ALIVE_SECONDS)
        except TimeoutError:
            return [b": still here\n\n"]
        num_listeners = self._feed.num_listeners
        if first is not None and num_listeners > _FEW_LISTENERS:
            await asyncio.sleep(min(num_listeners * _SECONDS_PER_LISTENER, _LONGEST_GATHERING_SECONDS))
        found = [first]
        while not self._waiting.empty():
            found.append(self._waiting.get_nowait())
        texts = [text for text in found if text is not None]
        pieces: list[bytes | None] = [b"".join(texts)] if texts else []
        return pieces if len(texts) == len(found) else [*pieces, None]

    def _add(self, text: bytes) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, text)

    def _end(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, None)

    def _deliver(self, text: bytes) -> None:
        if self._waiting.qsize() >= _MOST_WAITING:
            self._feed.unsubscribe(self._number)
            self._waiting.put_nowait(None)
        else:
            self._waiting.put_nowait(text)


def _reread(engine: Engine, after: int) -> list[bytes]:
    """The messages from the log, if it still has them."""
    newest = engine.store.revision
    if newest - after > _MOST_REREAD:
        return [_RESYNC]
    found = [message(revision, event) for revision, event in engine.store.read(after) if revision <= newest]
    return found if len(found) == newest - after else [_RESYNC, *found]
