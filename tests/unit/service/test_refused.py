"""A backend that cannot start what was decided: a node has just gone, or its engine lends nothing."""

import itertools

import pytest

from pollux import policies
from pollux.backends.protocol import ReplicasLost
from pollux.core import Decision, Node, Placement
from pollux.core.errors import BackendFailed
from pollux.testing.servers.service import result_of, sample_report


class All:
    """Every job gets as much as it may have, node by node."""

    name, batch = "all", "adaptive"
    needs: frozenset[str] = frozenset()

    def allocate(self, snapshot):
        allocation = {}
        for job in snapshot.jobs:
            lacking, counts = job.limits.max_gpus, {}
            for node in snapshot.cluster.nodes:
                counts[node.id] = min(node.num_gpus, lacking)
                lacking -= counts[node.id]
            allocation[job.id] = Placement.of({node: count for node, count in counts.items() if count})
        return Decision(allocation)


@pytest.fixture
def fleet(make_world, monkeypatch):
    """Two nodes of two GPUs each, and job `job`, live, on both GPUs of the first."""
    monkeypatch.setattr(policies, "create", lambda name: All())
    world = make_world(gpus=2)
    world.submit(min_gpus=1, max_gpus=2, on_resize="live", retries=0)
    world.backend.started("job")
    result_of(world.engine.report("job", sample_report(1, live=True)))
    world.backend.node_up(Node("node-1", 2, "cpu"))
    world.after(3.0)
    assert world.engine.job("job").placement == {"node-0": 2}
    return world


def lacks(world, node):
    """The node is gone, and nobody has told the service yet."""
    world.backend.nodes.pop(node)

    def refuse(launch):
        if launch.placement.on(node):
            raise BackendFailed(f"job '{launch.job_id}' cannot be placed: there is no node '{node}'")

    for name in ("submit", "resize"):
        real = getattr(world.backend, name)
        setattr(world.backend, name, lambda launch, real=real: (refuse(launch), real(launch)))


def test_a_start_on_a_node_that_has_just_gone_is_no_crash(make_world):
    world = make_world(gpus=2)
    lacks(world, "node-0")
    world.submit(retries=0, max_gpus=2)
    status = world.engine.job("job")
    assert (status.state, status.crashes, status.reason.code) == ("queued", 0, "refused")
    assert "no node 'node-0'" in status.detail
    assert "no node 'node-0'" in status.reason.text
    world.after(500.0)
    assert world.engine.job("job").state in ("queued", "starting")
    assert world.engine.job("job").crashes == 0


def test_a_live_job_that_cannot_be_changed_is_not_left_without_anybody(fleet):
    lacks(fleet, "node-1")
    result_of(fleet.engine.resize("job", 1, 4))
    fleet.after(3.0)
    status = fleet.engine.job("job")
    assert (status.crashes, status.state) == (0, "queued")
    assert fleet.backend.stops[-1][0] == "job", "its replicas would train on, and nobody would know"


def test_growth_that_the_engine_does_not_lend_is_tried_again_later(fleet):
    result_of(fleet.engine.resize("job", 1, 4))
    held = fleet.backend.launches[0].placement
    fleet.after(3.0)
    tried = []
    for _ in range(12):
        order = fleet.backend.resizes[-1]
        assert order.placement.num_gpus == 4
        tried.append(fleet.clock.time)
        told = ReplicasLost(
            fleet.clock.time, "job", order.generation, (2, 3), held, "other Ray jobs hold it", refused=True
        )
        fleet.backend.send(told)
        fleet.engine.loop.wait_until_idle()
        assert fleet.backend.resizes[-1].placement == Placement.of(dict(held.shares))
        fleet.backend.started("job")
        fleet.engine.loop.wait_until_idle()
        assert fleet.engine.job("job").state == "running"
        while fleet.backend.resizes[-1].placement.num_gpus < 4:
            fleet.after(1.0)
    record = fleet.engine.pipeline.controller.jobs["job"]
    assert (record.losses, record.crashes, record.failed_moves) == (0, 0, 0)
    gaps = [late - early for early, late in itertools.pairwise(tried)]
    assert gaps[-1] >= 60.0
