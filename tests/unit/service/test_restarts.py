from __future__ import annotations

from pollux.backends.protocol import Running
from pollux.controller import JobRecord, JobSpec, JobState
from pollux.core import Node, Placement
from pollux.service.executor import reconcile


def restart(world, jobs="keep"):
    world.engine.stop(jobs)
    world.engine = world.new_engine()
    world.engine.start()
    world.engine.settle()


def a_record(state, generation=1):
    held = state in (JobState.STARTING, JobState.RUNNING)
    placement = Placement((("n", 1),)) if held else Placement()
    return JobRecord(JobSpec("j"), 0.0, state, placement, generation)


def test_a_kept_job_is_found_again_and_nothing_starts_twice(world):
    world.submit()
    world.backend.started("job")
    world.engine.settle()
    before = world.engine.job("job")
    restart(world)
    assert world.engine.job("job") == before
    assert len(world.backend.launches) == 1
    assert world.backend.stops == []


def test_a_stopped_job_goes_on_at_the_next_start(world):
    world.backend._by_itself = True
    world.submit()
    world.engine.settle()
    assert world.engine.job("job").state == "running"
    restart(world, "stop")
    world.after(5.0)
    assert world.engine.job("job").state == "running"
    assert world.engine.job("job").crashes == 0
    assert [launch.generation for launch in world.backend.launches] == [1, 3]


def test_what_was_decided_but_not_launched_is_launched(world):
    world.submit()
    world.backend._entries.clear()
    restart(world)
    assert [launch.generation for launch in world.backend.launches] == [1, 1]


def test_what_ended_meanwhile_is_told(world):
    world.submit()
    world.engine.stop("keep")
    world.backend.ended("job", "succeeded")
    world.engine = world.new_engine()
    world.engine.start()
    assert world.engine.job("job").state == "succeeded"
    assert world.backend.forgotten == ["job"]


def test_foreign_replicas_are_stopped(world):
    world.backend._entries["ghost"] = Running("ghost", 3, "running")
    restart(world)
    assert ("ghost", 3) in world.backend.stops


def test_nodes_that_changed_meanwhile_are_noticed(world):
    world.engine.stop("keep")
    world.backend.nodes = {"node-7": Node("node-7", 2)}
    world.engine = world.new_engine()
    world.engine.start()
    assert [(node.id, node.gpus) for node in world.engine.status().nodes] == [("node-7", 2)]


def test_everything_shown_survives_a_restart(world):
    world.submit("a", max_gpus=1)
    world.submit("b", max_gpus=1)
    world.engine.cancel("a")
    world.engine.runner.save()
    world.submit("c", max_gpus=1)
    before = world.engine.jobs(), world.engine.story("a"), world.engine.status().revision
    restart(world)
    assert (world.engine.jobs(), world.engine.story("a"), world.engine.status().revision) == before


def test_rounds_are_not_shifted_by_a_restart(make_world):
    world = make_world(trigger="rounds")
    world.at(1030.0)
    assert world.engine.next_due() == 1060.0
    restart(world)
    assert world.engine.next_due() == 1060.0


def test_rounds_begin_where_there_were_none(world):
    world.settings["trigger"] = "rounds"
    restart(world)
    assert world.engine.next_due() == world.clock.time + 60.0


def test_reconciling_compares_generations():
    held = a_record(JobState.RUNNING, 3)
    assert reconcile({"j": held}, []).start == (held,)
    assert reconcile({"j": held}, [Running("j", 2, "running")]).start == (held,)
    assert reconcile({"j": held}, [Running("j", 2, "running")]).stop == (("j", 2),)
    assert reconcile({"j": held}, [Running("j", 3, "waiting")]) == reconcile({}, [])
    queued = a_record(JobState.QUEUED, 4)
    assert reconcile({"j": queued}, [Running("j", 3, "running")]).stop == (("j", 3),)
    over = a_record(JobState.CANCELLED, 4)
    assert reconcile({"j": over}, [Running("j", 3, "ended")]).forget == ("j",)
    assert reconcile({"j": over}, [Running("j", 3, "running")]).stop == (("j", 3),)
