"""Changes of running jobs as the service orders them: in living processes where the job can, by restarts where not."""

import pytest

from pollux.backends.protocol import ReplicasLost, ReplicasStarted
from pollux.controller.explain import explain_cost
from pollux.core import Placement
from pollux.testing.service import sample_report


@pytest.fixture
def running(world):
    """Job `job` on three GPUs, whose agent can follow changes."""
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    world.engine.report("job", sample_report(1, live=True))
    world.after(3.0)
    return world


def resize(world, gpus):
    world.engine.resize("job", 1, gpus)
    world.after(3.0)


def test_launches_say_whether_replicas_may_change(world):
    world.submit("elastic", on_resize="live")
    world.engine.cancel("elastic")
    world.submit("default")
    world.engine.cancel("default")
    world.submit("restarts", on_resize="restart")
    world.engine.cancel("restarts")
    world.submit("rigid", min_gpus=2, max_gpus=2)
    assert [launch.live for launch in world.backend.launches] == [True, True, False, False]


def test_a_job_that_can_is_changed_while_it_runs(running):
    assert running.engine.job("job").gpus > 1
    resize(running, 1)
    order = running.backend.resizes[-1]
    assert (order.generation, order.placement.num_gpus, order.live) == (2, 1, True)
    assert "POLLUX_STOPPED_AT" not in order.env
    assert (running.backend.stops, len(running.backend.launches)) == ([], 1)
    assert running.engine.job("job").state == "resizing"
    running.backend.started("job")
    running.engine.settle()
    assert running.engine.job("job").state == "running"


@pytest.mark.parametrize("how", ["never said so", "may not", "failed too often"])
def test_others_are_stopped_and_started(world, how):
    world.submit(min_gpus=3, max_gpus=4, on_resize="restart" if how == "may not" else "live")
    world.backend.started("job")
    world.engine.report("job", sample_report(1, live=how != "never said so"))
    if how == "failed too often":
        world.engine.runner.controller.jobs["job"].failed_moves = 3
    resize(world, 1)
    assert world.backend.resizes == []
    assert world.backend.stops == [("job", 1)]
    launch = world.backend.launches[-1]
    assert (launch.generation, launch.placement.num_gpus) == (2, 1)
    assert "POLLUX_STOPPED_AT" in launch.env


def test_survivors_of_a_loss_are_told_to_go_on(running):
    running.engine.resize("job", 1, 4)
    held = running.engine.job("job").gpus
    running.backend.lost("job", (held - 1,), Placement.of({"node-0": held - 1}), "replica 3 was killed by signal 9")
    running.engine.settle()
    order = running.backend.resizes[0]
    assert (order.generation, order.placement.num_gpus) == (2, held - 1)
    assert running.backend.stops == []
    assert any("killed by signal 9" in line.text for line in running.engine.story("job"))
    assert running.engine.job("job").reason.code in ("replicas-lost", "grew")


def test_a_loss_that_is_told_twice_counts_once(running):
    held = running.engine.job("job").gpus
    remaining = Placement.of({"node-0": held - 1})
    running.engine.resize("job", 1, 4)
    running.engine.settle()
    generation = running.engine.job("job").generation
    for _ in range(2):
        running.backend.tell(ReplicasLost(running.clock.now(), "job", generation, (0,), remaining))
        running.engine.settle()
    assert running.engine.runner.controller.jobs["job"].losses == 1


def test_too_few_survivors_are_stopped(world):
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    world.backend.lost("job", (0, 1), Placement.of({"node-0": 2}))
    world.engine.settle()
    assert world.backend.stops == [("job", 2)]
    assert world.backend.resizes == []


def test_a_change_that_was_given_up_becomes_a_restart_with_its_reason(running):
    resize(running, 1)
    running.backend.ended("job", "lost", "the state of 'tokenizer' cannot travel")
    running.engine.settle()
    launch = running.backend.launches[-1]
    assert (launch.generation, launch.placement.num_gpus, launch.live) == (3, 1, True)
    assert any("'tokenizer' cannot travel" in line.text for line in running.engine.story("job"))
    running.backend.started("job")
    running.engine.settle()
    assert running.engine.job("job").state == "running"


def test_what_it_costs_is_shown(running):
    before = running.engine.job("job")
    assert (before.resize_kind, before.resize_seconds, before.resize_costs) == ("live", 30.0, {})
    running.engine.report("job", sample_report(1, live=True, resize_seconds=0.4, resize_kind="grow"))
    after = running.engine.job("job")
    assert (after.resize_seconds, after.resize_costs) == (0.4, {"grow": 0.4})
    assert "0.4 s, in its living processes" in explain_cost(running.engine.board.get("job").record)


def test_the_backend_says_what_to_expect_at_first(world):
    world.backend.live_seconds, world.backend.restart_seconds = 1.0, 5.0
    world.submit("elastic", max_gpus=2, on_resize="live")
    world.submit("restarts", max_gpus=2, on_resize="restart")
    assert [world.engine.job(name).resize_seconds for name in ("elastic", "restarts")] == [1.0, 5.0]


@pytest.mark.parametrize(
    ("seconds", "kind", "noted"), [(0.2, "shrink", {"shrink": 0.2}), (float("nan"), "shrink", {}), (0.2, "x", {})]
)
def test_what_the_backend_measured_is_kept_if_it_can_be(running, seconds, kind, noted):
    resize(running, 1)
    running.backend.tell(ReplicasStarted(running.clock.now(), "job", 2, seconds, kind))
    running.engine.settle()
    status = running.engine.job("job")
    assert (status.state, status.resize_costs) == ("running", noted)


def test_a_kind_that_nobody_knows_is_refused(running):
    with pytest.raises(Exception, match="resize_kind"):
        running.engine.report("job", sample_report(1, resize_seconds=0.4, resize_kind="teleport"))
