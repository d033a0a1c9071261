"""A stream of events lasts no longer than the session that it was opened with."""

from __future__ import annotations

import asyncio

import pytest

from pollux.service import Tokens, create_app
from pollux.service.auth.sessions import SESSION_SECONDS, Sessions
from pollux.service.http import sse
from pollux.store import MemoryStore
from pollux.testing.servers.service import ManualClock
from pollux.testing.waiting import PATIENCE_SECONDS


class Open:
    """One request for the events, as a server makes it; `parts` is what was sent so far."""

    def __init__(self, app, headers):
        self.parts, self.asked = [], False
        self.over = asyncio.Event()
        scope = {
            "type": "http", "method": "GET", "path": "/v1/events", "raw_path": b"/v1/events", "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), *headers], "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
            "scheme": "http", "http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self):
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.parts.append(message)

    @property
    def text(self):
        return b"".join(part.get("body", b"") for part in self.parts)

    async def says(self, word):
        async with asyncio.timeout(PATIENCE_SECONDS):
            while word not in self.text:
                await asyncio.sleep(0.005)

    async def ends(self):
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_SECONDS)
        assert self.parts[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    async def leave(self):
        self.over.set()
        await asyncio.wait_for(self.task, PATIENCE_SECONDS)


@pytest.fixture
def app(world):
    return create_app(world.engine, world.tokens)


def signed_in(app, token):
    session_id, _ = app._sessions.open(token)
    return session_id, [(b"cookie", f"{app._sessions.cookie}={session_id}".encode())]


def test_signing_out_ends_the_streams_of_that_browser_and_no_others(world, app):
    async def scene():
        mine, cookie = signed_in(app, world.tokens.operator)
        _, other_cookie = signed_in(app, world.tokens.operator)
        bearer = [(b"authorization", f"Bearer {world.tokens.operator}".encode())]
        tabs = [Open(app, cookie), Open(app, cookie)]
        others = [Open(app, other_cookie), Open(app, bearer)]
        for stream in (*tabs, *others):
            await stream.says(b"hello")
        # At once, by itself: nothing else happens meanwhile.
        await asyncio.to_thread(app._sessions.close, mine)
        for stream in tabs:
            await stream.ends()
        await asyncio.to_thread(world.submit, "secret", max_gpus=1)
        for stream in others:
            await stream.says(b"secret")
            await stream.leave()
        assert all(b"secret" not in stream.text for stream in tabs)
        assert world.engine.views.feed.num_listeners == 0
        assert not app._sessions._watchers

    asyncio.run(scene())


def test_a_session_that_is_over_hears_nothing_more(world, app):
    async def scene():
        _, cookie = signed_in(app, world.tokens.viewer)
        stream = Open(app, cookie)
        await stream.says(b"hello")
        await asyncio.to_thread(world.after, SESSION_SECONDS)
        await asyncio.to_thread(world.submit, "secret", max_gpus=1)
        await stream.ends()
        assert b"secret" not in stream.text
        late = Open(app, cookie)
        await asyncio.wait_for(late.task, PATIENCE_SECONDS)
        assert late.parts[0]["status"] == 401

    asyncio.run(scene())


def test_a_session_that_is_over_is_found_where_nothing_happens(world, app, monkeypatch):
    monkeypatch.setattr(sse, "_KEEP_ALIVE_SECONDS", 0.05)

    async def scene():
        _, cookie = signed_in(app, world.tokens.viewer)
        stream = Open(app, cookie)
        await stream.says(b"still here")
        await asyncio.to_thread(world.after, SESSION_SECONDS)
        await stream.ends()

    asyncio.run(scene())


def test_who_watches_a_session_is_told_once_it_is_ended_or_crowded_out():
    clock = ManualClock(1000.0)
    tokens = Tokens("operator-token-for-tests", "secret", "viewer-token-for-tests")
    sessions = Sessions(MemoryStore(), tokens, clock.now)
    told = []

    def opened(name):
        clock.set(clock.time + 1.0)
        session_id, _ = sessions.open(tokens.viewer)
        return session_id, sessions.watch(session_id, lambda: told.append(name))

    first, _ = opened("first")
    second, unwatch = opened("second")
    third, _ = opened("third")
    unwatch()
    unwatch()
    sessions.close(second)
    assert told == []
    sessions.close(third)
    sessions.close(third)
    assert told == ["third"]
    for number in range(128):
        opened(f"later-{number}")
    assert told == ["third", "first"]
    assert sessions.find(first) is None
    assert len(sessions._watchers) == 128
