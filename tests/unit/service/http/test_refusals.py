"""Whatever the API refuses is counted, and each kind is a line in the log: who, and why."""

import logging

import pytest
from starlette.testclient import TestClient

from pollux.service import create_app
from pollux.service.server.peers import ConnectionLimits, Peers

BASE = "http://127.0.0.1:7341"


@pytest.fixture
def api(world):
    with TestClient(create_app(world.engine, world.tokens), base_url=BASE, client=("192.0.2.9", 4711)) as client:
        client.world = world
        yield client


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def signed_in(api):
    """The headers of a browser that is signed in, but not of our own page."""
    answer = api.post("/v1/session", json={"token": api.world.tokens.operator})
    assert answer.status_code == 200, answer.text
    return {}


REFUSED = {
    "an unknown token": (401, "does not know the token", lambda api: api.get("/v1/jobs", headers=bearer("no"))),
    "no token": (401, "has no token", lambda api: api.get("/v1/jobs")),
    "a foreign host": (403, "evil.example", lambda api: api.get("/v1/jobs", headers={"Host": "evil.example"})),
    "two of a header": (
        422, "twice", lambda api: api.get("/v1/jobs", headers=[("Authorization", "a"), ("authorization", "b")])
    ),
    "a change from a foreign page": (
        403, "X-Pollux-CSRF", lambda api: api.post("/v1/jobs", headers=signed_in(api), json={})
    ),
    "a sign-in from a foreign page": (
        403, "", lambda api: api.post("/v1/session", headers={"Sec-Fetch-Site": "cross-site"}, json={"token": "x"})
    ),
    "a sign-in by guessing": (401, "'/v1/session'", lambda api: api.post("/v1/session", json={"token": "x" * 40})),
    "a viewer's change": (
        403, "may look", lambda api: api.post("/v1/jobs", headers=bearer(api.world.tokens.viewer), json={})
    ),
    "a job's look at others": (
        403, "'/v1/jobs'", lambda api: api.get("/v1/jobs", headers=bearer(api.world.tokens.for_job("train")))
    ),
    "a body that is too long": (
        413, "more than",
        lambda api: api.post("/v1/jobs", headers=bearer(api.world.tokens.operator), content=b" " * 1_100_000),
    ),
}  # fmt: skip


def told(caplog):
    return [each.getMessage() for each in caplog.records if "the API refused" in each.getMessage()]


@pytest.mark.parametrize("kind", REFUSED)
def test_each_kind_of_refusal_is_counted_and_told(api, caplog, kind):
    status, why, ask = REFUSED[kind]
    before = api.world.engine.refusals.count
    with caplog.at_level(logging.WARNING):
        assert ask(api).status_code == status
    assert api.world.engine.refusals.count == before + 1
    assert len(told(caplog)) == 1
    assert "the API refused 192.0.2.9:4711" in told(caplog)[0]
    assert why in told(caplog)[0]
    counted = api.get("/metrics", headers=bearer(api.world.tokens.operator)).text
    assert f"pollux_refused_connections_total {before + 1}" in counted


def test_thousands_of_refusals_are_few_lines(api, caplog):
    refusals = api.world.engine.refusals
    with caplog.at_level(logging.WARNING):
        for kind in ("unknown token", "no token", "foreign host"):
            for _ in range(200):
                next(ask for name, (_, _, ask) in REFUSED.items() if kind in name)(api)
        for number in range(10_000):
            refusals.tell(("192.0.2.9", number), "token 401", "it has none")
    assert refusals.count == 10_600
    assert 2 <= len(told(caplog)) <= 12


def test_dropped_strangers_are_counted_and_told(world, caplog):
    peers = Peers(ConnectionLimits(most=20, most_strangers=10), world.engine.refusals)
    with caplog.at_level(logging.WARNING):
        for _ in range(110):
            peers.come("192.0.2.9")
    assert peers.num_dropped == world.engine.refusals.count == 100
    assert len(told(caplog)) == 1
    assert "the API refused 192.0.2.9: there are too many connections" in told(caplog)[0]
