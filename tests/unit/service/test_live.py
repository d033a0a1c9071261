"""Changes of running jobs as the service orders them: in living processes where the job can, by restarts where not."""

import pytest

from pollux import policies
from pollux.backends.protocol import ReplicasLost, ReplicasStarted, Running
from pollux.controller.explanations.explain import explain_cost
from pollux.core import Decision, Node, Placement
from pollux.core.errors import InvalidInput
from pollux.testing.servers.service import result_of, sample_report


@pytest.fixture
def running(world):
    """Job `job` on three GPUs, whose agent can follow changes."""
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=True)))
    world.after(3.0)
    return world


def resize(world, gpus):
    result_of(world.engine.resize("job", 1, gpus))
    world.after(3.0)


def test_launches_say_whether_replicas_may_change(world):
    world.submit("elastic", on_resize="live")
    result_of(world.engine.cancel("elastic"))
    world.submit("default")
    result_of(world.engine.cancel("default"))
    world.submit("restarts", on_resize="restart")
    result_of(world.engine.cancel("restarts"))
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
    running.engine.loop.wait_until_idle()
    assert running.engine.job("job").state == "running"


@pytest.mark.parametrize("how", ["said it cannot", "may not", "failed too often"])
def test_others_are_stopped_and_started(world, how):
    world.submit(min_gpus=3, max_gpus=4, on_resize="restart" if how == "may not" else "live")
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=how != "said it cannot")))
    if how == "failed too often":
        record = world.engine.pipeline.controller.jobs["job"]
        record.failed_moves, record.failed_move_at = 3, world.clock.time
    resize(world, 1)
    assert world.backend.resizes == []
    assert world.backend.stops == [("job", 1)]
    launch = world.backend.launches[-1]
    assert (launch.generation, launch.placement.num_gpus) == (2, 1)
    assert "POLLUX_STOPPED_AT" in launch.env


def test_survivors_of_a_loss_are_told_to_go_on(running):
    result_of(running.engine.resize("job", 1, 4))
    held = running.engine.job("job").gpus
    running.backend.lost("job", (held - 1,), Placement.of({"node-0": held - 1}), "replica 3 was killed by signal 9")
    running.engine.loop.wait_until_idle()
    order = running.backend.resizes[0]
    assert (order.generation, order.placement.num_gpus) == (2, held - 1)
    assert running.backend.stops == []
    assert any("killed by signal 9" in line.text for line in running.engine.events_of("job"))
    assert running.engine.job("job").reason.code in ("replicas-lost", "grew")


def test_a_loss_that_is_told_twice_counts_once(running):
    held = running.engine.job("job").gpus
    remaining = Placement.of({"node-0": held - 1})
    result_of(running.engine.resize("job", 1, 4))
    running.engine.loop.wait_until_idle()
    generation = running.engine.job("job").generation
    for _ in range(2):
        running.backend.send(ReplicasLost(running.clock.now(), "job", generation, (0,), remaining))
        running.engine.loop.wait_until_idle()
    assert running.engine.pipeline.controller.jobs["job"].losses == 1


def test_a_withdrawn_change_is_no_loss(running):
    held = running.engine.job("job").gpus
    result_of(running.engine.resize("job", 1, 4))
    running.engine.loop.wait_until_idle()
    generation = running.engine.job("job").generation
    remaining = Placement.of({"node-0": held - 1})
    running.backend.send(
        ReplicasLost(running.clock.now(), "job", generation, (0,), remaining, "never came", withdrawn=True)
    )
    running.engine.loop.wait_until_idle()
    record = running.engine.pipeline.controller.jobs["job"]
    assert (record.losses, record.placement.num_gpus, record.detail) == (0, held - 1, "never came")


def test_progress_of_a_job_without_an_end_is_known_after_a_loss(running):
    record = running.engine.pipeline.controller.jobs["job"]
    result_of(running.engine.resize("job", 1, 4))
    for progress in (100.0, 101.0, 102.0):
        held = record.placement.num_gpus
        told = sample_report(record.generation, live=True, progress=progress, total_progress=None)
        result_of(running.engine.report("job", told))
        running.backend.lost("job", (held - 1,), Placement.of({"node-0": held - 1}), "killed")
        running.engine.loop.wait_until_idle()
        if record.placement.num_gpus == 1:
            break
    assert (record.losses, record.progress_at_loss) == (1, record.progress)


def test_too_few_survivors_are_stopped(world):
    world.submit(min_gpus=3, max_gpus=4, on_resize="live")
    world.backend.started("job")
    world.backend.lost("job", (0, 1), Placement.of({"node-0": 2}))
    world.engine.loop.wait_until_idle()
    assert world.backend.stops == [("job", 2)]
    assert world.backend.resizes == []


def test_a_change_that_was_given_up_becomes_a_restart_with_its_reason(running):
    resize(running, 1)
    running.backend.ended("job", "lost", "the state of 'tokenizer' cannot travel")
    running.engine.loop.wait_until_idle()
    launch = running.backend.launches[-1]
    assert (launch.generation, launch.placement.num_gpus, launch.live) == (3, 1, True)
    assert any("'tokenizer' cannot travel" in line.text for line in running.engine.events_of("job"))
    running.backend.started("job")
    running.engine.loop.wait_until_idle()
    assert running.engine.job("job").state == "running"


def test_what_it_costs_is_shown(running):
    before = running.engine.job("job")
    assert (before.resize_kind, before.resize_seconds, before.resize_costs) == ("live", 30.0, {})
    resize(running, 1)
    running.backend.send(ReplicasStarted(running.clock.now(), "job", 2, 0.4, "grow"))
    running.engine.loop.wait_until_idle()
    result_of(running.engine.report("job", sample_report(2, live=True, resize_seconds=0.5, resize_kind="grow")))
    after = running.engine.job("job")
    assert (after.resize_seconds, after.resize_costs) == (0.4, {"grow": 0.4})
    assert "0.4 s, live" in explain_cost(running.engine.views.board.get("job").record)


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
    running.backend.send(ReplicasStarted(running.clock.now(), "job", 2, seconds, kind))
    running.engine.loop.wait_until_idle()
    status = running.engine.job("job")
    assert (status.state, status.resize_costs) == ("running", noted)


def test_a_kind_that_nobody_knows_is_refused(running):
    with pytest.raises(InvalidInput, match="resize_kind 'teleport'; give one of restart, ") as refused:
        result_of(running.engine.report("job", sample_report(1, resize_seconds=0.4, resize_kind="teleport")))
    assert refused.value.http_status == 422, "the job is there"


# Before the first report


def test_a_job_that_has_not_said_whether_it_can_is_tried(world):
    world.submit(min_gpus=3, max_gpus=4)
    world.backend.started("job")
    world.after(1.0)
    assert world.engine.job("job").resize_kind == "live"
    resize(world, 1)
    assert [order.generation for order in world.backend.resizes] == [2]
    assert world.backend.stops == []


def test_who_then_shows_that_it_cannot_is_restarted_until_it_says_otherwise(world):
    world.submit(min_gpus=3, max_gpus=4)
    world.backend.started("job")
    resize(world, 1)
    world.backend.ended("job", "lost", "it cannot change while it runs: no agent gives a sign of life")
    world.engine.loop.wait_until_idle()
    status = world.engine.job("job")
    assert (world.backend.launches[-1].generation, status.reason.code) == (3, "fell-back")
    assert "no agent gives a sign of life" in status.reason.text
    world.backend.started("job")
    world.engine.loop.wait_until_idle()
    assert world.engine.job("job").resize_kind == "restart"
    resize(world, 4)
    assert len(world.backend.resizes) == 1
    result_of(world.engine.report("job", sample_report(world.engine.job("job").generation, live=True)))
    assert world.engine.job("job").resize_kind == "live"


# What a restart costs


def stopped_at(launch):
    return float(launch.env["POLLUX_STOPPED_AT"])


def test_the_pause_of_a_change_that_became_a_restart_is_measured(running):
    assert "POLLUX_STOPPED_AT" not in running.backend.launches[0].env, "a first start is no pause"
    resize(running, 1)
    running.backend.ended("job", "lost", "it cannot travel")
    running.engine.loop.wait_until_idle()
    assert stopped_at(running.backend.launches[-1]) == running.clock.time
    running.backend.started("job")
    result_of(running.engine.report("job", sample_report(3, live=True, resize_seconds=9.0, resize_kind="restart")))
    again = sample_report(3, step=20, live=True, resize_seconds=9.5, resize_kind="restart")
    result_of(running.engine.report("job", again))
    status = running.engine.job("job")
    assert status.resize_costs == {"restart": 9.0}
    result_of(running.engine.report("job", sample_report(3, live=True, resize_seconds=1.5, resize_kind="shrink")))
    assert "with a restart about 9 s" in explain_cost(running.engine.views.board.get("job").record)


def test_so_is_the_start_after_a_loss(running):
    running.backend.ended("job", "lost", "its shim ended")
    running.engine.loop.wait_until_idle()
    running.after(5.0)
    again = running.backend.launches[-1]
    assert again.generation > 1
    assert running.clock.time - 5.0 <= stopped_at(again) <= running.clock.time


class Elsewhere:
    """Places the one job there is on the newest node."""

    name, batch = "elsewhere", "adaptive"
    needs: frozenset[str] = frozenset()

    def allocate(self, snapshot):
        newest = snapshot.cluster.nodes[-1].id
        return Decision({job.id: Placement.of({newest: 2}) for job in snapshot.jobs})


def test_a_move_that_keeps_no_node_is_live_too(make_world, monkeypatch):
    monkeypatch.setattr(policies, "create", lambda name: Elsewhere())
    world = make_world()
    world.submit(min_gpus=1, max_gpus=2)
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=True)))
    world.after(3.0)
    world.backend.node_up(Node("node-1", 4, "cpu"))
    world.after(3.0)
    (launch,) = world.backend.resizes
    assert launch.live
    assert launch.placement == Placement.of({"node-1": 2})
    assert world.backend.stops == []
    assert len(world.backend.launches) == 1


@pytest.mark.parametrize(("live", "said"), [
    (True, "waits for its GPUs to become free"), (False, "waits for its earlier replicas to leave"),
])  # fmt: skip
def test_only_who_is_resized_by_a_restart_waits_for_itself(make_world, monkeypatch, live, said):
    monkeypatch.setattr(policies, "create", lambda name: Elsewhere())
    world = make_world()
    world.submit(min_gpus=1, max_gpus=2)
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=live)))
    world.after(3.0)
    world.backend.resize = lambda launch: None
    world.backend.stop = lambda *words: None
    world.backend.node_up(Node("node-1", 4, "cpu"))
    world.after(3.0)
    assert world.engine.job("job").state == "resizing"
    world.backend._entries["job"] = Running("job", 2, "waiting")
    assert world.engine.job("job").detail == said
