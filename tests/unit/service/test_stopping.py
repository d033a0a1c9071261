"""The way down: what is still answered, what is refused, and that nobody is left without an answer."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from pollux.backends.protocol import Running
from pollux.core.errors import UnknownName, Unreachable
from pollux.service.engine.executor import waits_to_leave
from pollux.service.engine.loop import _Action
from pollux.testing.servers.service import result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.job import JobRequest


def request(name):
    return JobRequest(name, ("x",), workdir="/")


def test_while_jobs_stop_everything_but_new_jobs_is_answered(world):
    world.submit("a", max_gpus=1, grace_seconds=7.0)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    assert world.engine.loop.stopping_seconds("stop") == 22.0
    assert world.engine.loop.stopping_seconds("keep") == 15.0
    down = threading.Thread(target=world.engine.loop.wind_down, args=("stop",))
    down.start()
    while not world.backend.stops:
        result_of(world.engine.status())
    assert world.engine.stopping
    with pytest.raises(Unreachable, match="stopping"):
        result_of(world.engine.submit(request("b")))
    with pytest.raises(Unreachable, match="stopping"):
        result_of(world.engine.plan(request("b")))
    assert result_of(world.engine.report("a", sample_report(1))).report_every_seconds == 30.0
    assert result_of(world.engine.status()).jobs_by_state == {"running": 1}
    world.backend.ended("a", "stopped")
    down.join(PATIENCE_SECONDS)
    assert not down.is_alive()
    world.engine.loop.wait_until_idle()
    assert world.engine.job("a").state == "queued"
    world.engine.stop()
    assert len(world.backend.launches) == 1


def test_on_the_way_down_nothing_is_started(world):
    world.submit("a", max_gpus=1)
    world.engine.submit(request("b"))
    world.engine.loop.wind_down("keep")
    world.after(10.0)
    world.backend.ended("a", "crashed", "x")
    world.after(100.0)
    assert [launch.job_id for launch in world.backend.launches][:1] == ["a"]
    assert all(launch.job_id != "b" or launch.generation == 1 for launch in world.backend.launches)
    assert world.engine.job("a").state == "queued"


def test_a_decision_in_flight_is_dropped_on_the_way_down(world):
    from pollux.service.engine.decision_thread import DecisionResult

    world.submit("a", max_gpus=1)
    snapshot = world.engine.pipeline.controller.snapshot(world.clock.time)
    decision = world.engine.policy.allocate(snapshot)
    world.engine.loop.wind_down("keep")
    before = world.store.revision
    world.engine.loop._decided(DecisionResult(snapshot, decision, 0.0))
    world.engine.loop.wait_until_idle()
    assert world.store.revision == before


def test_asks_beside_a_stop_are_answered_or_refused(world):
    gate = threading.Event()
    world.engine.loop.read(lambda: gate.wait(PATIENCE_SECONDS))
    status = world.engine.status()
    stop = threading.Thread(target=world.engine.stop, args=("keep",))
    stop.start()
    asks = [world.engine.status() for _ in range(50)]
    gate.set()
    late = [world.engine.status() for _ in range(50)]
    for ask in (status, *asks, *late):
        error = ask.exception(30)
        assert error is None or isinstance(error, Unreachable)
    assert status.exception(30) is None
    stop.join(PATIENCE_SECONDS)
    assert isinstance(world.engine.status().exception(30), Unreachable)


def test_asks_of_the_same_turn_as_a_stop_are_answered(world):
    gate = threading.Event()
    world.engine.loop.read(lambda: gate.wait(PATIENCE_SECONDS))
    asks = [world.engine.status() for _ in range(3)]
    ended: Future[None] = Future()
    world.engine.loop._queue.put(_Action(lambda: world.engine.loop._stop_after_run(ended), ended))
    gate.set()
    for ask in asks:
        assert ask.exception(10) is None
    assert ended.exception(10) is None


def test_what_is_put_as_the_loop_ends_is_refused(world, monkeypatch):
    put = world.engine.loop._queue.put

    class Late:
        """A queue in which the loop ends just before something is put."""

        def put(self, item):
            world.engine.loop._queue = real
            world.engine.stop("keep")
            put(item)

    real, world.engine.loop._queue = world.engine.loop._queue, Late()
    assert isinstance(world.engine.status().exception(30), Unreachable)


def test_who_gave_up_waiting_is_not_served(world):
    gate = threading.Event()
    world.engine.loop.read(lambda: gate.wait(PATIENCE_SECONDS))
    asked = world.engine.loop.request(lambda at: pytest.fail("was served"), lambda: None)
    assert asked.cancel()
    gate.set()
    assert result_of(world.engine.status()).nodes


# What is said


def test_a_job_that_waits_for_leaving_replicas_says_so(make_world):
    world = make_world(gpus=1)
    world.submit("old", min_gpus=1, max_gpus=1)
    world.backend.started("old")
    result_of(world.engine.cancel("old"))
    world.submit("new", min_gpus=1, max_gpus=1)
    world.backend._entries["new"] = Running("new", 1, "waiting")
    assert world.engine.job("new").detail == "waits for 'old' to leave"
    world.backend._entries["new"] = Running("new", 1, "running")
    assert world.engine.job("new").detail == ""


def test_who_leaves_is_named():
    entries = [
        Running("a", 2, "waiting"), Running("b", 1, "stopping"), Running("c", 3, "waiting"), Running("d", 1, "running"),
        Running("e", 1, "waiting"),
    ]  # fmt: skip
    assert waits_to_leave("a", entries, lambda job_id: job_id == "c") == "waits for 'b', 'c' to leave"
    assert waits_to_leave("d", entries, lambda job_id: False) == ""
    assert waits_to_leave("x", entries, lambda job_id: False) == ""
    alone = [Running("a", 2, "waiting")]
    assert waits_to_leave("a", alone, lambda job_id: True) == "waits for its earlier replicas to leave"
    assert waits_to_leave("a", alone, lambda job_id: False) == "waits for its GPUs to become free"


def test_a_job_that_cannot_start_here_is_told_what_there_is(world):
    _, plan = result_of(world.engine.submit(JobRequest("big", ("x",), 99, 99, workdir="/")))
    assert plan.text == "cannot start here now: it needs 99 GPUs, and there are 4"
    world.after(5.0)
    reason = world.engine.job("big").reason
    assert (reason.code, reason.text) == ("fits-nowhere", plan.text)


def test_re_allocations_are_told_with_their_reason(make_world):
    world = make_world(gpus=1)
    world.submit("a", min_gpus=1, max_gpus=1)
    lines = [line.text for line in world.engine.events_of("a")]
    assert lines[0] == "submitted for 1 GPU"
    assert lines[1].startswith("given 1 GPU: node-0:1; started on 1 GPU")


def test_a_replica_that_never_was_has_no_log(world):
    world.submit("a", min_gpus=2, max_gpus=2)
    assert world.engine.logs("a", 1).at_end
    with pytest.raises(UnknownName, match="unknown replica of job 'a' '2': known: 0, 1"):
        world.engine.logs("a", 2)
    world.submit("b", min_gpus=4, max_gpus=4)
    assert world.engine.logs("b", 0).at_end
    with pytest.raises(UnknownName, match=r"known: 0$"):
        world.engine.logs("b", 1)


def test_who_follows_another_gets_an_eta_by_it(world):
    from pollux.testing.servers.service import SAMPLE_MODEL

    world.submit("first", max_gpus=1)
    world.backend.started("first")
    result_of(world.engine.report("first", sample_report(1, model=SAMPLE_MODEL)))
    world.submit("second", max_gpus=1, after=("first",))
    record, first = world.engine.pipeline.controller.jobs["second"], world.engine.pipeline.controller.jobs["first"]
    record.goodput, record.remaining = first.goodput, first.remaining
    world.engine.views.show(["second"], world.engine.pipeline.controller, world.clock.time)
    eta, before = world.engine.job("second").eta, world.engine.job("first").eta
    assert eta is not None
    assert eta.low > before.low
