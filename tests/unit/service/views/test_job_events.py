"""What happened to a job has an end, whatever ended it."""

from __future__ import annotations

import pytest

from pollux.testing.servers.service import result_of


def lines(world, job):
    return [(line.kind, line.text) for line in world.engine.events_of(job)]


def restart(world):
    world.engine.stop("keep")
    world.engine = world.new_engine()
    world.engine.start()
    world.engine.loop.wait_until_idle()


def test_a_time_limit_is_the_end_of_the_story(world):
    world.submit("slow", time_limit_seconds=60.0)
    world.backend.started("slow")
    world.engine.loop.wait_until_idle()
    world.after(61.0)
    assert lines(world, "slow")[-1] == ("finished", "failed: time limit of 60 s reached")
    world.backend.ended("slow", "stopped")
    world.engine.loop.wait_until_idle()
    before = lines(world, "slow")
    assert [kind for kind, _ in before].count("finished") == 1
    restart(world)
    assert lines(world, "slow") == before


def test_a_dependency_that_failed_is_the_end_of_the_story(world):
    world.submit("first")
    world.submit("second", after=("first",))
    result_of(world.engine.cancel("first"))
    assert lines(world, "second")[-1] == ("finished", "failed: it was to run after job 'first', which is cancelled")
    world.submit("third", after=("first",))
    assert lines(world, "third")[-1][1] == "failed: it was to run after job 'first', which is cancelled"
    restart(world)
    assert [kind for kind, _ in lines(world, "second")] == ["submitted", "finished"]


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled"])
def test_an_end_that_was_told_is_told_once(world, outcome):
    world.submit("a", retries=0)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    if outcome == "cancelled":
        result_of(world.engine.cancel("a"))
    else:
        world.backend.ended("a", "succeeded" if outcome == "succeeded" else "crashed", "code 3")
        world.engine.loop.wait_until_idle()
    assert world.engine.job("a").state == outcome
    assert [kind for kind, _ in lines(world, "a")] == [
        "submitted", "placed", "running", "cancelled" if outcome == "cancelled" else "ended",
    ]  # fmt: skip
