from __future__ import annotations

import asyncio

import pytest
from starlette.testclient import TestClient

from pollux.service import create_app
from pollux.service.http import sse
from pollux.service.http.sse import event_stream
from pollux.testing.waiting import PATIENCE_SECONDS


class SilentFeed:
    """A feed that nothing happens in."""

    def __init__(self, num_listeners):
        self.num_listeners = num_listeners

    def subscribe(self, tell, after):
        return 0, []


async def gathered(texts, num_listeners):
    subscription = sse._Subscription(SilentFeed(num_listeners), None, None)
    for text in texts:
        subscription._waiting.put_nowait(text)
    return await subscription.next_pieces()


def test_what_waits_is_sent_as_one_piece():
    assert asyncio.run(gathered([b"a", b"b", b"c"], 1)) == [b"abc"]
    assert asyncio.run(gathered([b"a"], 1)) == [b"a"]
    assert asyncio.run(gathered([b"a", b"b", None], 1)) == [b"ab", None]
    assert asyncio.run(gathered([None], 100)) == [None]


def test_with_many_watching_pieces_are_fewer(monkeypatch):
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(sse.asyncio, "sleep", sleep)
    for count in (1, 8, 100, 10_000):
        asyncio.run(gathered([b"a"], count))
    assert slept == [pytest.approx(0.2), 0.5]


def test_everybody_hears_everything_in_order(world):
    """A hundred listeners, and more facts than are sent one by one."""
    heard: list[list[bytes]] = [[] for _ in range(100)]

    async def listen(pieces):
        stream = event_stream(world.engine, None, True)
        try:
            async for piece in stream:
                pieces.append(piece)
                if b"j19" in piece:
                    return
        finally:
            await stream.aclose()

    async def all_of_it():
        tasks = [asyncio.ensure_future(listen(pieces)) for pieces in heard]
        feed = world.engine.views.feed
        while feed.num_listeners < 100:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(lambda: [world.submit(f"j{number:02d}", max_gpus=1) for number in range(20)])
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
        assert feed.num_listeners == 0

    asyncio.run(all_of_it())
    # Who was slower has heard of what came after the last job as well.
    texts = {_up_to(b'"j19"', b"".join(pieces)) for pieces in heard}
    (text,) = texts
    places = [text.index(f'"j{number:02d}"'.encode()) for number in range(20)]
    assert places == sorted(places)
    assert all(len(pieces) < b"".join(pieces).count(b"data:") for pieces in heard)


def _up_to(word, text):
    """The messages up to the first that has the word."""
    return text[: text.index(b"\n\n", text.index(word))]


def test_a_signed_in_browser_follows_and_comes_back(world):
    app = create_app(world.engine, world.tokens)
    with TestClient(app, base_url="http://127.0.0.1:7341") as browser:
        assert browser.get("/v1/events?follow=false").status_code == 401
        browser.post("/v1/session", json={"token": world.tokens.viewer})
        before = world.store.revision
        world.submit("a", max_gpus=1)
        missed = browser.get("/v1/events?follow=false", headers={"last-event-id": str(before)})
        assert missed.headers["content-type"].startswith("text/event-stream")
        assert "event: submitted" in missed.text
        assert f"id: {world.store.revision}" in missed.text
