"""Answers without an end: server-sent events for whoever watches, bounded for whoever is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from pollux.core.errors import InvalidInput
from pollux.service.auth.sessions import Sessions
from pollux.service.engine.engine import Engine
from pollux.service.views.job_events import message

__all__ = ["SignIn", "event_stream", "resume_point"]

_KEEP_ALIVE_SECONDS = 15.0
_MOST_WAITING = 1024
_MOST_REREAD = 20_000
# Every piece is sent to every listener by itself: with many, a little later and in fewer pieces.
_FEW_LISTENERS = 8
_SECONDS_PER_LISTENER = 0.002
_LONGEST_GATHERING_SECONDS = 0.5
_RESYNC = b'event: resync\ndata: {"text": "events before this were dropped from the log; list the jobs again"}\n\n'


@dataclass(frozen=True, slots=True)
class SignIn:
    """The session of the browser that reads a stream: the stream lasts no longer."""

    sessions: Sessions
    session_id: str

    @property
    def holds(self) -> bool:
        """Whether nobody has signed out since, and it is not too old."""
        return self.sessions.find(self.session_id) is not None

    def watch(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Have `tell` called once it is ended; what is returned ends the watch."""
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
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[bytes | None] = asyncio.Queue()

    def deliver(text: bytes) -> None:
        if waiting.qsize() >= _MOST_WAITING:
            engine.views.feed.unsubscribe(number)
            waiting.put_nowait(None)
        else:
            waiting.put_nowait(text)

    def hear(text: bytes) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, text)

    def signed_out() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(waiting.put_nowait, None)

    def may_go_on() -> bool:
        return sign_in is None or sign_in.holds

    unwatch = None if sign_in is None else sign_in.watch(signed_out)
    number, missed = engine.views.feed.subscribe(hear, after)
    try:
        yield b": hello\n\n"
        if missed is None:
            missed = await asyncio.to_thread(_reread, engine, after or 0)
        for text in missed:
            yield text
        while follow and may_go_on():
            try:
                new = await asyncio.wait_for(waiting.get(), _KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            for piece in await _together(new, waiting, engine.views.feed.num_listeners):
                if piece is None or not may_go_on():
                    return
                yield piece
    finally:
        if unwatch is not None:
            unwatch()
        engine.views.feed.unsubscribe(number)


async def _together(
    first: bytes | None, waiting: asyncio.Queue[bytes | None], num_listeners: int
) -> list[bytes | None]:
    """What has come, and what comes within a moment, as one piece: the longer the moment, the more people watch.

    A None at the end: its reader fell behind.
    """
    if first is not None and num_listeners > _FEW_LISTENERS:
        await asyncio.sleep(min(num_listeners * _SECONDS_PER_LISTENER, _LONGEST_GATHERING_SECONDS))
    found = [first]
    while not waiting.empty():
        found.append(waiting.get_nowait())
    texts = [text for text in found if text is not None]
    pieces: list[bytes | None] = [b"".join(texts)] if texts else []
    return pieces if len(texts) == len(found) else [*pieces, None]


def _reread(engine: Engine, after: int) -> list[bytes]:
    """From the log itself, where it still has them."""
    newest = engine.store.revision
    if newest - after > _MOST_REREAD:
        return [_RESYNC]
    found = [message(revision, event) for revision, event in engine.store.read(after) if revision <= newest]
    return found if len(found) == newest - after else [_RESYNC, *found]
