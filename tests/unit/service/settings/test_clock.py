"""A wall clock that steps back must stop nothing."""

import logging
from pathlib import Path

import pytest

from pollux import policies
from pollux.controller import JobSubmitted
from pollux.controller.messages.events import JobSpec
from pollux.core import Node
from pollux.service import Engine, ServiceSettings
from pollux.service.settings.clock import SystemClock
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import FakeBackend


class Machine:
    """A machine with a clock on the wall and one that only goes on."""

    def __init__(self, wall=1000.0):
        self.wall, self.steady = wall, 50.0

    def pass_by(self, seconds):
        self.wall += seconds
        self.steady += seconds

    def clock(self):
        return SystemClock(lambda: self.wall, lambda: self.steady)


def test_it_shows_the_wall_and_follows_it_forwards():
    machine = Machine()
    clock = machine.clock()
    assert clock.now() == 1000.0
    machine.pass_by(5.0)
    assert clock.now() == 1005.0
    machine.wall += 4.0
    assert clock.now() == 1009.0, "somebody keeps its clock right"
    machine.pass_by(3600.0)
    assert clock.now() == 4609.0, "it slept"


@pytest.mark.parametrize("seconds", [30.0, 7200.0, 100 * 86400.0])
def test_it_does_not_follow_a_jump_by_itself(seconds):
    machine = Machine()
    clock = machine.clock()
    machine.wall += seconds
    assert (clock.now(), clock.late()) == (1000.0, seconds)
    machine.pass_by(10.0)
    assert clock.now() == 1010.0
    clock.skip(seconds)
    assert (clock.now(), clock.late()) == (1010.0 + seconds, 0.0)


def test_where_the_wall_steps_back_it_goes_on():
    machine = Machine()
    clock = machine.clock()
    clock.now()
    machine.wall -= 3600.0
    assert clock.now() == 1000.0
    machine.pass_by(2.0)
    assert clock.now() == 1002.0
    machine.pass_by(3600.0)
    assert clock.now() == 4602.0


def test_it_can_begin_at_a_time_that_is_still_to_come():
    machine = Machine()
    clock = machine.clock()
    assert clock.advance_to(4600.0) == 3600.0
    machine.pass_by(1.0)
    assert clock.now() == 4601.0
    assert clock.advance_to(10.0) == 0.0
    assert clock.now() == 4601.0


@pytest.fixture
def make_engine(tmp_path: Path):
    made = []

    def make(store, machine):
        backend = FakeBackend([Node("node-0", 4, "cpu")])
        settings = ServiceSettings(home=tmp_path)
        engine = Engine(policies.create("pollux"), backend, store, MemoryTelemetry(), settings, machine.clock())
        engine.start()
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.stop("keep")


def test_a_log_with_facts_from_the_future_is_gone_on_from(make_engine, caplog):
    store = MemoryStore()
    store.append([JobSubmitted(9000.0, JobSpec("old"))])
    machine = Machine()
    with caplog.at_level(logging.WARNING):
        engine = make_engine(store, machine)
    assert "facts of 8000 s from now" in caplog.text
    assert engine.now() == 9000.0
    machine.pass_by(10.0)
    assert engine.now() == engine.pipeline.now() == 9010.0


def test_an_ordinary_log_is_not_spoken_of(make_engine, caplog):
    store = MemoryStore()
    store.append([JobSubmitted(990.0, JobSpec("old"))])
    with caplog.at_level(logging.WARNING):
        assert make_engine(store, Machine()).now() == 1000.0
    # Its thread may have tried to start the job by now, in vain: it has nothing to run.
    assert "from now" not in caplog.text
