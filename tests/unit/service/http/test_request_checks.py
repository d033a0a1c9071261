"""Odd headers and targets: each is refused the same way whatever is behind, or means what it means elsewhere."""

from __future__ import annotations

import asyncio
import json

import pytest

from pollux.core.errors import Forbidden, InvalidInput
from pollux.service.http.middleware import Guard
from pollux.service.http.request_checks import KnownHosts, headers_of

HOST = (b"host", b"127.0.0.1:7341")


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST", "LocalHost:7341", "localhost.", "localhost.:7341", "127.0.0.1", "127.0.0.1:1",
        "127.0.0.1.", "127.9.9.9", "[::1]", "[::1]:7341", "Pollux.Example", "pollux.example.:80", "192.0.2.7:1",
        "[2001:DB8::1]",
    ],
)  # fmt: skip
def test_names_of_this_service(host):
    arrived = "2001:db8:0::1" if "DB8" in host else "192.0.2.7"
    KnownHosts(["POLLUX.example"]).check(host, arrived)


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:7341", "127.0.0.1.evil.example", "localhost.evil", "localhost..",
        "localhost:",
        "localhost:7341:1", "localhost:x", "127.0.0.1@evil", "127.1", "0x7f.1", "[::1]evil", "[::1", ":7341",
        "localhost:٣", "192.0.2.8", "pollux.example, evil.example", "local\xadhost", "http://localhost",
    ],
)  # fmt: skip
@pytest.mark.parametrize("arrived", ["192.0.2.7", "testserver", None])
def test_names_of_others(host, arrived):
    with pytest.raises(Forbidden, match="does not answer for"):
        KnownHosts(["pollux.example"]).check(host, arrived)


@pytest.mark.parametrize("path", ["http://127.0.0.1:7341/v1/jobs", "*", "evil.example:80", ""])
def test_a_target_that_is_no_path_is_refused(path):
    with pytest.raises(InvalidInput, match="ask for a path"):
        headers_of({"path": path, "headers": [HOST]})


ONCE = ("host", "authorization", "content-length", "transfer-encoding", "origin", "x-pollux-csrf", "sec-fetch-site")


@pytest.mark.parametrize("name", [*ONCE, *(name.upper() for name in ONCE)])
def test_what_may_be_there_once_is_refused_twice(name):
    """Whoever reads the first, and whoever reads the last, must not see two different requests."""
    twice = [(name.lower().encode(), b"1"), (name.encode(), b"2")]
    with pytest.raises(InvalidInput, match="twice"):
        headers_of({"path": "/", "headers": twice})
    assert headers_of({"path": "/", "headers": [(b"accept", b"1"), (b"accept", b"2")]})


def test_two_lengths_of_one_body_are_refused():
    with pytest.raises(InvalidInput, match="both"):
        headers_of({"path": "/", "headers": [(b"transfer-encoding", b"chunked"), (b"content-length", b"3")]})


def test_what_is_refused_reaches_nothing_behind(world):
    sent = []

    async def behind(scope, receive, send):
        raise AssertionError("this must not be called")

    async def send(message):
        sent.append(message)

    guard = Guard(behind, world.tokens)
    scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": [HOST, HOST]}
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 422
    assert json.loads(sent[1]["body"])["error"]["code"] == "InvalidInput"
