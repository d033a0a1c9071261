from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.store import MemoryStore, MemoryTelemetry, Store, Telemetry
from pollux.testing.servers.service import FakeBackend, ManualClock, result_of
from pollux.wire.job import JobRequest


class World:
    """An engine with everything around it in the test's hands."""

    def __init__(
        self, home: Path, policy: str = "pollux", gpus: int = 4, store: Store | None = None, **settings: Any
    ) -> None:
        self.settings = settings
        self.home = home
        self.policy = policy
        self.clock = ManualClock(1000.0)
        self.backend = FakeBackend([Node("node-0", gpus, "cpu")], self.clock)
        self.store: Store = store or MemoryStore()
        self.telemetry: Telemetry = MemoryTelemetry()
        self.tokens = Tokens.random()
        self.engine = self.new_engine()
        self.engine.start()
        self.at(1010.0)

    def new_engine(self) -> Engine:
        settings = ServiceSettings(home=self.home, policy=self.policy, url="http://127.0.0.1:1", **self.settings)
        return Engine(
            policies.create(self.policy), self.backend, self.store, self.telemetry, settings, self.clock, self.tokens
        )

    def at(self, time: float) -> None:
        """Move the clock and let everything happen that is due by then, in its order."""
        while (due := self.engine.loop.next_due()) is not None and due <= time:
            self.move(max(due, self.clock.time))
        self.move(time)

    def move(self, time: float) -> None:
        """Move the clock in one step, and let everything happen that is due then."""
        self.clock.set(time, self.engine)
        self.engine.loop.wait_until_idle()

    def after(self, seconds: float) -> None:
        self.at(self.clock.time + seconds)

    def submit(self, name: str = "job", **fields: object) -> str:
        given = {"run": ("sleep", "1"), "min_gpus": 1, "max_gpus": 4, "workdir": str(self.home), **fields}
        status, _ = result_of(self.engine.submit(JobRequest(name=name, **given)))  # type: ignore[arg-type]
        self.after(3.0)  # decisions are at least two seconds apart
        return status.id


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: object) -> World:
        worlds.append(World(tmp_path, **options))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for world in worlds:
        world.engine.stop("keep")


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def client(world: World) -> Iterator[TestClient]:
    """Requests of the operator to the service of `world`."""
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        yield client
