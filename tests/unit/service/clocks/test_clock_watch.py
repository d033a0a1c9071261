"""A machine's clock that jumps, before a service, while it runs and between two: nothing is counted or forgotten."""

from __future__ import annotations

import logging

import pytest

from pollux import policies
from pollux.controller import JobState, TimeSkipped
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, SystemClock
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import FakeBackend, result_of
from pollux.wire.job import JobRequest

DAY = 86400.0
JUMPS = [30.0, 7200.0, 100 * DAY]


class Machine:
    """A machine with services one after the other, and clocks that a test moves."""

    def __init__(self, home, monkeypatch):
        self.home = home
        self.wall, self.uptime, self.boot = 1e9, 5000.0, "boot-1"
        self.store, self.telemetry = MemoryStore(), MemoryTelemetry()
        self.backend = FakeBackend([Node("node-0", 4, "cpu")], by_itself=True)
        monkeypatch.setattr("pollux.service.clocks.clock_watch.boot_id", lambda: self.boot)

    def start(self):
        settings = ServiceSettings(home=self.home, snapshot_every_facts=1)
        clock = SystemClock(lambda: self.wall, lambda: self.uptime)
        policy = policies.create("fifo")
        self.engine = Engine(policy, self.backend, self.store, self.telemetry, settings, clock)
        self.engine.start()
        self.settle()

    def stop(self):
        self.engine.stop("keep")

    def restart(self, boot):
        """The machine: what runs there ends."""
        self.boot, self.uptime = boot, 10.0
        self.backend = FakeBackend([Node("node-0", 4, "cpu")], by_itself=True)

    def settle(self):
        for _ in range(3):
            self.engine.loop.wait_until_idle()

    def passes(self, seconds, step=300.0):
        while seconds > 0:
            now = min(step, seconds)
            self.wall, self.uptime, seconds = self.wall + now, self.uptime + now, seconds - now
            self.settle()

    def submit(self, name, **fields):
        given = {"run": ("x",), "min_gpus": 1, "max_gpus": 1, "workdir": str(self.home), **fields}
        result_of(self.engine.submit(JobRequest(name, **given)))
        self.passes(3.0)
        assert self.state(name) is JobState.RUNNING

    def state(self, name):
        return self.engine.views.board.get(name).record.state

    def record(self, name):
        return self.engine.pipeline.controller.jobs[name]

    def skips(self):
        return [event for _, event in self.store.read() if isinstance(event, TimeSkipped)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    found = Machine(tmp_path, monkeypatch)
    found.start()
    found.submit("limited", time_limit_seconds=3600.0)
    found.submit("over")
    result_of(found.engine.cancel("over"))
    yield found
    found.stop()


def still_right(machine, ran):
    """The job goes on and has its whole hour; the one that has ended is known."""
    assert machine.state("limited") is JobState.RUNNING
    assert machine.state("over") is JobState.CANCELLED
    record, now = machine.record("limited"), machine.engine.now()
    assert record.running_seconds(now) == pytest.approx(ran, abs=10.0)
    assert record.attained(now) == pytest.approx(ran, abs=10.0)
    machine.passes(3600.0 - ran - 60.0)
    assert machine.state("limited") is JobState.RUNNING
    machine.passes(120.0, 10.0)
    assert machine.state("limited") is JobState.FAILED
    assert machine.state("over") is JobState.CANCELLED


@pytest.mark.parametrize("jump", [*JUMPS, *(-seconds for seconds in JUMPS)])
def test_a_jump_of_seconds_is_nothing(machine, jump, caplog):
    began = machine.engine.now()
    machine.wall += jump
    machine.passes(14.0, 1.0)
    machine.wall -= jump
    machine.passes(1.0)
    assert machine.engine.now() == pytest.approx(began + 15.0)
    assert machine.skips() == []
    assert ("is back" in caplog.text) == (jump > 0)
    still_right(machine, 21.0)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_that_lasts_is_followed_and_not_counted(machine, jump, caplog):
    began = machine.engine.now()
    machine.wall += jump
    machine.settle()
    machine.passes(590.0, 100.0)
    assert machine.engine.now() == pytest.approx(began + 590.0)
    machine.passes(20.0)
    assert machine.engine.now() == machine.wall == pytest.approx(began + 610.0 + jump)
    assert [skip.seconds for skip in machine.skips()] == [pytest.approx(jump)]
    assert "the service's clock went forward" in caplog.text
    still_right(machine, 616.0)


def test_a_clock_that_is_put_back_for_good_is_not_followed(machine):
    began = machine.engine.now()
    machine.wall -= 100 * DAY
    machine.passes(1200.0)
    assert machine.engine.now() == pytest.approx(began + 1200.0)
    still_right(machine, 1206.0)


@pytest.mark.parametrize("jump", [*JUMPS, *(-seconds for seconds in JUMPS)])
def test_a_jump_while_no_service_runs_is_noticed(machine, jump):
    machine.stop()
    began = machine.engine.now()
    machine.wall += jump
    began = began if jump > 0 else machine.engine.now()
    machine.uptime, machine.wall = machine.uptime + 60.0, machine.wall + 60.0
    machine.start()
    assert machine.engine.now() == pytest.approx(began + 60.0)
    machine.passes(620.0, 100.0)
    assert machine.engine.now() == pytest.approx(began + 680.0 + max(jump, 0.0))
    still_right(machine, 686.0)


def test_time_in_which_no_service_ran_counts_for_jobs_that_went_on(machine):
    machine.stop()
    machine.uptime, machine.wall = machine.uptime + 1800.0, machine.wall + 1800.0
    machine.start()
    still_right(machine, 1806.0)


@pytest.mark.parametrize("away", [2 * DAY, 100 * DAY])
def test_what_has_ended_is_not_forgotten_because_nobody_was_there(machine, away):
    """The machine was off, or its clock was wrong when it was started: nobody can tell."""
    machine.stop()
    machine.wall += away
    machine.restart("boot-2")
    machine.start()
    machine.passes(600.0)
    assert machine.state("over") is JobState.CANCELLED
    [skip] = machine.skips()
    assert (skip.away, skip.seconds) == (True, pytest.approx(away, abs=10.0))


def test_old_jobs_are_still_forgotten_when_their_time_has_passed(machine):
    machine.passes(3700.0)
    machine.passes(91 * DAY, DAY / 2)
    machine.submit("next")
    machine.passes(1300.0)
    assert "over" not in machine.engine.pipeline.controller.jobs


def test_another_jump_begins_the_wait_again(machine):
    machine.wall += 7200.0
    machine.settle()
    machine.passes(400.0, 100.0)
    machine.wall += 7200.0
    machine.settle()
    machine.passes(400.0, 100.0)
    assert machine.skips() == []
    machine.passes(300.0, 100.0)
    assert [skip.seconds for skip in machine.skips()] == [pytest.approx(14400.0)]


def test_what_cannot_be_read_is_no_jump(machine):
    machine.stop()
    machine.store.set_setting("clock", "nonsense")
    machine.start()
    still_right(machine, 6.0)


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING, "pollux.service")
