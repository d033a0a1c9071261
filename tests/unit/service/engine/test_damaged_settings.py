"""What the store keeps beside its log may be damaged: the service starts, and submissions are taken."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pollux.core.errors import StoreFailed
from pollux.service import create_app
from pollux.service.clocks.clock_watch import ClockWatch, boot_id
from pollux.service.engine.job_ids import JobIds
from pollux.service.settings import ServiceSettings
from pollux.service.settings.clock import SystemClock
from pollux.store.memory import MemoryStore
from pollux.wire.job import JobRequest

REQUEST = JobRequest(name="train", run=("true",))
DAMAGED = (
    "{",
    "\udcff",
    "[]",
    "7",
    "null",
    '{"a": 1}',
    '{"a": []}',
    '{"a": ["x"]}',
    "[" * 100_000,
    '{"a": [1, 2, 3]}',
    "b'x'",
)
NUMBERS = ("nan", "1e999", "-inf", *(f'["{boot_id()}", {each}]' for each in ('"x"', "NaN", "1e999", "[]")))


def ids_over(text, tmp_path):
    store = MemoryStore()
    store.set_setting("idempotency", text)
    return JobIds(store, ServiceSettings(home=tmp_path))


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_keys_are_none_and_said_once(tmp_path, caplog, text):
    ids = ids_over(text, tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert ids.of_submission(REQUEST, None, {}) == ("train", False)
        assert ids.of_submission(REQUEST, "key", {}) == ("train", False)
    assert len([each for each in caplog.records if "idempotency keys" in each.getMessage()]) == 1
    assert ids._known_keys().keys() == {"key"}, "the next key mends the list"


@given(text=st.text(max_size=30) | st.from_regex(r'\{"[a-z]": \[?("x"|1|null|\{\}),? ?("y"|2|\[\])?\]?\}'))
def test_nothing_in_the_setting_fails_a_submission(tmp_path_factory, text):
    ids = ids_over(text, tmp_path_factory.getbasetemp())
    assert ids.of_submission(REQUEST, "key", {})[1] is False


def test_keys_that_cannot_be_read_are_none(tmp_path, monkeypatch):
    ids = ids_over("{}", tmp_path)

    def fails(name):
        raise StoreFailed("no UTF-8")

    monkeypatch.setattr(ids._store, "setting", fails)
    assert ids.of_submission(REQUEST, None, {}) == ("train", False)


@pytest.mark.parametrize("name", ["idempotency", "sessions", "clock", "began_at"])
@pytest.mark.parametrize("text", [*DAMAGED, *NUMBERS, '{"a": ["operator", "x", "y"]}', '{"a": [[], 1, 1]}', "[[], []]"])
def test_no_damaged_setting_keeps_the_service_down(make_world, name, text):
    store = MemoryStore()
    store.set_setting(name, text)
    world = make_world(store=store, policy="fifo", interval_seconds=60.0)
    ClockWatch(SystemClock(), store)
    client = TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341")
    with client:
        assert client.post("/v1/session", json={"token": world.tokens.operator}).status_code == 200
    world.submit("train")
    assert world.engine.job("train").state == "starting"
