"""Replicas that were told to stop and end with exit code 0: done only where the job itself said so."""

import pytest

from pollux.backends.protocol import Exit, ReplicasEnded
from pollux.controller import JobState
from pollux.testing.servers.service import result_of, sample_report


def ended(world, code=0, generation=1):
    return ReplicasEnded(world.clock.now(), "job", generation, "stopped", (Exit(0, code, world.clock.now()),))


def started(world):
    world.submit()
    world.backend.started("job")
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == JobState.RUNNING


def test_a_script_that_saves_and_exits_with_0_goes_on_later(world):
    started(world)
    result_of(world.engine.report("job", sample_report(1)))
    world.backend.send(ended(world))
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state != JobState.SUCCEEDED


def test_a_job_that_was_done_when_it_was_told_has_succeeded(world):
    started(world)
    result_of(world.engine.report("job", sample_report(1, progress=1000.0, final=True)))
    world.backend.send(ended(world))
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == JobState.SUCCEEDED


def test_also_where_it_was_paused_in_that_moment(world):
    started(world)
    result_of(world.engine.pause("job"))
    result_of(world.engine.report("job", sample_report(1, progress=1000.0, final=True)))
    world.backend.send(ended(world))
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state == JobState.SUCCEEDED


@pytest.mark.parametrize(("code", "generation"), [(3, 1), (0, 0)])
def test_not_where_it_failed_afterwards_or_another_generation_said_so(world, code, generation):
    started(world)
    result_of(world.engine.report("job", sample_report(generation, progress=1000.0, final=True)))
    world.backend.send(ended(world, code))
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").state != JobState.SUCCEEDED
