"""What /readyz says: it tries what requests need, and waits for nothing long."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.testclient import TestClient

from pollux.core.errors import StoreFailed, Unreachable
from pollux.service.http.foreign_reads import ForeignReads
from pollux.service.http.readiness import ServiceReadiness
from pollux.service.server.app import create_app
from pollux.testing.waiting import PATIENCE_SECONDS


def client_of(world):
    return TestClient(create_app(world.engine, world.tokens, ("testserver",), lambda jobs: None))


def test_a_backend_that_fails_at_its_work_is_not_ready(world):
    client = client_of(world)
    assert client.get("/readyz").status_code == 200
    world.backend.healthy = False
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "backend" in answer.json()["error"]["message"]
    assert client.get("/healthz").status_code == 200


def test_a_store_that_fails_is_not_ready(world, monkeypatch):
    def fails(name):
        raise StoreFailed("the disk is gone")

    client = client_of(world)
    monkeypatch.setattr(world.store, "setting", fails)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the store of the service fails: the disk is gone"


@pytest.fixture
def held():
    """Something that hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def hang_store(world, foreign, held, monkeypatch):
    monkeypatch.setattr(world.store, "setting", lambda name: held.wait(PATIENCE_SECONDS))
    return "the store"


def hang_engine(world, foreign, held, monkeypatch):
    world.engine.loop.read(lambda: held.wait(PATIENCE_SECONDS))
    return "the engine"


def hang_threads(world, foreign, held, monkeypatch):
    for key in range(16):
        foreign.home._submit("x", _piece(key, held))
    return "the threads that read files of jobs"


def _piece(key, held):
    from concurrent.futures import Future

    from pollux.service.http.foreign_reads import _Piece

    return _Piece(key, lambda: held.wait(PATIENCE_SECONDS), Future())


def hang_folders(world, foreign, held, monkeypatch):
    for key in range(16):
        foreign.folders._submit("x", _piece(key, held))
    return "the threads that look at working folders"


@pytest.mark.parametrize("hang", [hang_store, hang_engine, hang_threads, hang_folders])
def test_what_hangs_is_named(world, held, hang, monkeypatch):
    foreign = ForeignReads()
    part = hang(world, foreign, held, monkeypatch)

    async def ask():
        readiness = ServiceReadiness(world.engine, foreign, seconds=2.0)
        found = await asyncio.gather(*(readiness.check() for _ in range(5)), return_exceptions=True)
        held.set()
        return found

    found = asyncio.run(ask())
    assert all(isinstance(error, Unreachable) for error in found)
    assert all(str(error).startswith(f"{part} of the service: no answer within 2 s") for error in found)


def test_those_who_ask_at_once_share_one_trial(world, monkeypatch):
    """Anybody may ask, without a token."""
    tried: list[str] = []
    monkeypatch.setattr(world.store, "setting", tried.append)
    now = [0.0]

    async def ask():
        readiness = ServiceReadiness(world.engine, ForeignReads(), clock=lambda: now[0])
        await asyncio.gather(*(readiness.check() for _ in range(50)))
        await readiness.check()
        now[0] = 2.0
        await readiness.check()

    asyncio.run(ask())
    assert len(tried) == 2
