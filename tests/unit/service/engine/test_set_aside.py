"""A node that is set aside by the service itself, or by an operator: what is written, said and kept."""

import pytest

from pollux.core import Node
from pollux.core.errors import Conflict, UnknownName
from pollux.service.presenters.cluster_summary import summary_of
from pollux.service.presenters.metrics import families
from pollux.service.presenters.prometheus_text import text_of
from pollux.service.views.job_events import lines_of
from pollux.testing.servers.service import result_of


def fail_on_first_node(world):
    world.backend.node_up(Node("node-1", 4, "cpu"))
    world.after(5.0)
    for number in range(3):
        job = world.submit(f"job-{number}", run=("python", f"{number}.py"), max_gpus=1, retries=0)
        assert [*world.engine.job(job).placement] == ["node-0"]
        world.backend.started(job)
        world.backend.ended(job, "crashed", "exit 1")
        world.after(3.0)


def nodes_of(world):
    return {node.id: node for node in result_of(world.engine.nodes())}


def test_the_service_sets_a_node_aside_says_so_and_uses_it_no_more(world, caplog):
    fail_on_first_node(world)
    found = nodes_of(world)
    assert [(node.id, node.schedulable) for node in found.values()] == [("node-0", False), ("node-1", True)]
    assert "3 different scripts failed there" in found["node-0"].set_aside
    assert "node 'node-0' is set aside: 3 different scripts" in caplog.text
    warnings = result_of(world.engine.status()).warnings
    assert [line for line in warnings if "'pollux nodes take-back node-0' has it used again" in line]
    assert world.engine.set_aside == {"node-0": found["node-0"].set_aside}
    engine = world.engine
    summary = summary_of(engine.views.board, engine.views.timeline, engine.cluster, engine.now())
    assert b"pollux_nodes_set_aside 1" in text_of(families(engine, summary))
    lines = [line for _, event in world.store.read(0) for line in lines_of(event) if line.kind == "node-set-aside"]
    assert [line.text.split(":")[0] for line in lines] == ["node 'node-0' is set aside"]
    job = world.submit("next", max_gpus=1)
    assert [*world.engine.job(job).placement] == ["node-1"]


def test_it_is_taken_back_by_whoever_asks(world):
    fail_on_first_node(world)
    assert result_of(world.engine.take_node_back("node-0")).schedulable
    with pytest.raises(Conflict, match="is in use"):
        result_of(world.engine.take_node_back("node-0"))
    found = result_of(world.engine.set_node_aside("node-1", ""))
    assert (found.schedulable, found.set_aside) == (False, "by an operator")
    with pytest.raises(UnknownName, match="nowhere"):
        result_of(world.engine.set_node_aside("nowhere", ""))
    job = world.submit("next", max_gpus=1)
    assert [*world.engine.job(job).placement] == ["node-0"]


def test_it_outlives_the_service(make_world):
    first = make_world()
    fail_on_first_node(first)
    first.engine.stop("keep")
    second = make_world(store=first.store)
    second.backend.node_up(Node("node-1", 4, "cpu"))
    second.after(5.0)
    assert [*second.engine.set_aside] == ["node-0"]
    assert not nodes_of(second)["node-0"].schedulable


def test_one_that_is_gone_can_be_taken_back_for_when_it_returns(world):
    fail_on_first_node(world)
    world.backend.node_down("node-0")
    world.after(3.0)
    assert result_of(world.engine.take_node_back("node-0")).gpus == 0
    assert world.engine.set_aside == {}
