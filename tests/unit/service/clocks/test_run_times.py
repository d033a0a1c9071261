"""Time limits go by what the backend measured, over jumps of clocks and starts of machines."""

from __future__ import annotations

import pytest

from pollux.backends.protocol import ReplicasEnded, Running
from pollux.controller import JobRan, JobState
from pollux.core import Node
from pollux.testing.servers.service import FakeBackend

LIMIT = 3600.0
WEEKEND = 60 * 3600.0


@pytest.fixture
def running(world):
    world.submit("job", time_limit_seconds=LIMIT, retries=3)
    world.backend.started("job")
    world.after(1.0)
    assert record(world).state is JobState.RUNNING
    return world


def record(world):
    return world.engine.pipeline.controller.jobs["job"]


def ran(world):
    return record(world).running_seconds(world.engine.now())


def facts(world):
    return [event.seconds for _, event in world.store.read() if isinstance(event, JobRan)]


def restart(world, backend=None, away=0.0):
    world.engine.stop("keep")
    world.clock.set(world.clock.time + away)
    world.backend = backend or world.backend
    world.engine = world.new_engine()
    world.engine.start()
    world.engine.loop.wait_until_idle()


def test_a_limit_waits_until_the_job_has_run_for_so_long(running):
    running.backend.ran["job"] = 100.0
    running.move(running.clock.time + 100 * 86400.0)
    assert record(running).state is JobState.RUNNING
    assert ran(running) == 100.0
    assert facts(running) == [100.0]
    running.backend.ran["job"] = 3590.0
    running.after(3495.0)
    assert record(running).state is JobState.RUNNING
    running.backend.ran["job"] = 3600.0
    running.after(10.0)
    assert record(running).state is JobState.FAILED
    assert "time limit of 3600 s" in record(running).detail


def test_gpu_seconds_leave_out_what_did_not_pass(running):
    running.backend.ran["job"] = 100.0
    running.move(running.clock.time + 100 * 86400.0)
    assert record(running).attained(running.engine.now()) <= 4 * 110.0


def test_where_nobody_measures_the_clock_counts(running):
    running.after(LIMIT - 100.0)
    assert record(running).state is JobState.RUNNING
    running.after(200.0)
    assert record(running).state is JobState.FAILED
    assert facts(running) == []


def test_run_times_of_limited_jobs_are_kept_as_facts(running):
    began = running.clock.time
    for _ in range(100):
        running.after(10.0)
        running.backend.ran["job"] = running.clock.time - began
    assert len(facts(running)) == 3
    running.submit("other")
    running.backend.started("other")
    running.backend.ran["other"] = 1.0
    running.after(400.0)
    assert {event.job_id for _, event in running.store.read() if isinstance(event, JobRan)} == {"job"}


def test_a_machine_that_was_off_has_run_nothing(running):
    """Nothing is left of the shim and its record: the newest fact is the last that is known."""
    running.after(600.0)
    running.engine.stop("keep")
    known = running.engine.pipeline.newest_at
    restart(running, FakeBackend([Node("node-0", 4, "cpu")], running.clock), WEEKEND)
    assert known < running.clock.time - WEEKEND
    assert [launch.job_id for launch in running.backend.launches] == ["job"]
    assert ran(running) <= 610.0
    running.backend.started("job")
    running.after(LIMIT - 700.0)
    assert record(running).state is JobState.RUNNING
    running.after(800.0)
    assert record(running).state is JobState.FAILED


def test_what_the_last_machine_measured_goes_on_on_the_next(running):
    running.after(600.0)
    backend = FakeBackend([Node("node-0", 4, "cpu")], running.clock)
    backend.ran["job"] = 580.0
    restart(running, backend, WEEKEND)
    assert ran(running) == 580.0


def test_a_job_that_went_on_without_the_service_has_run(running):
    running.after(600.0)
    running.backend.ran["job"] = 2400.0
    restart(running, away=1800.0)
    assert ran(running) == pytest.approx(2401.0, abs=2.0)
    running.backend.ran["job"] = LIMIT
    running.after(1300.0)
    assert record(running).state is JobState.FAILED


def test_one_that_ended_on_friday_has_not_run_until_monday(running):
    running.engine.stop("keep")
    at = running.clock.time
    running.backend.ran["job"] = 700.0
    ended = ReplicasEnded(at, "job", 1, "crashed")
    running.backend._entries["job"] = Running("job", 1, "ended", ended)
    restart(running, away=WEEKEND)
    assert record(running).crashes == 1
    assert record(running).held_seconds == 700.0


def test_one_that_ends_under_a_wrong_clock_has_run_as_measured(running):
    running.backend.ran["job"] = 50.0
    running.clock.set(running.clock.time + 1000.0, running.engine)
    running.backend.ended("job", "crashed")
    running.engine.loop.wait_until_idle()
    assert record(running).held_seconds == 50.0


def test_a_small_difference_is_no_fact(running):
    running.after(100.0)
    running.backend.ran["job"] = ran(running) - 2.0
    running.backend.ended("job", "crashed")
    running.engine.loop.wait_until_idle()
    assert facts(running) == []
