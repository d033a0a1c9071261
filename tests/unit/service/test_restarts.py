from __future__ import annotations

import pytest

from pollux import policies
from pollux.backends.protocol import Running
from pollux.controller import JobRecord, JobSpec, JobState, ResizeJob
from pollux.core import Node, Placement
from pollux.service import ServiceSettings, Tokens
from pollux.service.engine.executor import Executor, reconcile
from pollux.testing.servers.service import result_of, sample_report
from pollux.wire.job import JobRequest


def restart(world, jobs="keep"):
    world.engine.stop(jobs)
    world.engine = world.new_engine()
    world.engine.start()
    world.engine.loop.wait_until_idle()


def a_record(state, generation=1):
    held = state in (JobState.STARTING, JobState.RUNNING)
    placement = Placement((("n", 1),)) if held else Placement()
    return JobRecord(JobSpec("j"), 0.0, state, placement, generation)


def test_a_kept_job_is_found_again_and_nothing_starts_twice(world):
    world.submit()
    world.backend.started("job")
    world.engine.loop.wait_until_idle()
    before = world.engine.job("job")
    restart(world)
    assert world.engine.job("job") == before
    assert len(world.backend.launches) == 1
    assert world.backend.stops == []


def test_a_stopped_job_goes_on_at_the_next_start(world):
    world.backend._by_itself = True
    world.submit()
    world.engine.loop.wait_until_idle()
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
    assert [(node.id, node.gpus) for node in result_of(world.engine.status()).nodes] == [("node-7", 2)]


def test_everything_shown_survives_a_restart(world):
    world.submit("a", max_gpus=1)
    world.submit("b", max_gpus=1)
    result_of(world.engine.cancel("a"))
    world.engine.pipeline.save()
    world.submit("c", max_gpus=1)
    before = world.engine.jobs(), world.engine.events_of("a"), result_of(world.engine.status()).revision
    restart(world)
    assert (world.engine.jobs(), world.engine.events_of("a"), result_of(world.engine.status()).revision) == before


def test_rounds_are_not_shifted_by_a_restart(make_world):
    world = make_world(trigger="rounds")
    world.at(1030.0)
    assert world.engine.loop.next_due() == 1060.0
    restart(world)
    assert world.engine.loop.next_due() == 1060.0


def test_rounds_begin_where_there_were_none(world):
    world.settings["trigger"] = "rounds"
    restart(world)
    assert world.engine.loop.next_due() == world.clock.time + 60.0


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


# A change in living processes that was decided, and whose order the backend never got


def changes(**fields):
    """Job `j`, on its way to generation 3 in its living processes."""
    request = JobRequest(name="j", run=("x",), workdir="/", min_gpus=1, max_gpus=4)
    given = {"live": True, "state": JobState.RESIZING, **fields}
    return JobRecord(JobSpec("j", request=request), 0.0, placement=Placement((("n", 2),)), generation=3, **given)


@pytest.mark.parametrize("state", ["running", "waiting"])
def test_an_order_that_got_lost_is_given_again_and_nothing_is_stopped(state):
    record = changes()
    found = reconcile({"j": record}, [Running("j", 2, state)])
    assert (found.change, found.start, found.stop) == ((record,), (), ())


@pytest.mark.parametrize("fields", [{"live": False}, {"failed_moves": 3}, {"state": JobState.STARTING}])
def test_who_cannot_change_so_is_stopped_and_started(fields):
    record = changes(**fields)
    found = reconcile({"j": record}, [Running("j", 2, "running")])
    assert (found.change, found.start, found.stop) == ((), (record,), (("j", 2),))


@pytest.mark.parametrize("entry", [[], [Running("j", 2, "ended")], [Running("j", 2, "stopping")]])
def test_where_nothing_runs_any_more_there_is_nothing_to_change(entry):
    record = changes()
    found = reconcile({"j": record}, entry)
    assert (found.change, found.start) == ((), (record,))


def test_a_service_that_died_before_it_gave_the_order_is_followed_by_one_that_does(world):
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=True)))
    result_of(world.engine.resize("job", 1, 1))
    world.after(3.0)
    assert world.engine.job("job").state == "resizing"
    order = world.backend.resizes.pop()
    world.backend._entries["job"] = Running("job", 1, "running")
    restart(world)
    assert [(again.generation, again.placement) for again in world.backend.resizes] == [(2, order.placement)]
    assert world.backend.stops == []
    assert len(world.backend.launches) == 1


def test_a_job_whose_nodes_are_all_others_is_told_while_it_runs(world, tmp_path):
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=True)))
    settings = ServiceSettings(home=tmp_path)
    executor = Executor(world.backend, settings, Tokens.random(), policies.create("pollux").batch, print)
    there, elsewhere = Placement.of({"node-0": 3}), Placement.of({"node-1": 3})
    executor.execute([ResizeJob("job", 2, there, elsewhere)], world.engine.pipeline.controller.jobs, world.clock.time)
    assert [order.placement for order in world.backend.resizes] == [elsewhere]
    assert world.backend.stops == []


def test_a_restart_that_is_given_again_is_measured(world):
    world.submit(min_gpus=3, max_gpus=4, on_resize="restart")
    world.backend.started("job")
    world.after(10.0)
    result_of(world.engine.resize("job", 1, 1))
    world.after(3.0)
    world.backend._entries.pop("job")
    restart(world)
    again = world.backend.launches[-1]
    assert (again.generation, "POLLUX_STOPPED_AT" in again.env) == (2, True)
