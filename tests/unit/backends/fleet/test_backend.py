"""What a fleet's backend refuses, remembers and tells, over a lender that is only books."""

import json

import pytest

from pollux.backends.dispatch.slots import FleetSlotAllocator
from pollux.backends.fleet.backend import FleetBackend, fleet_secret
from pollux.backends.nodes.provider import LentNode, PooledNodeProvider
from pollux.backends.nodes.slot import read_slots
from pollux.backends.process.network import own_address
from pollux.backends.protocol import Launch, NodeDown, NodeUp
from pollux.core import Node, Placement
from pollux.core.errors import BackendFailed, InvalidInput
from pollux.testing.waiting import PATIENCE_SECONDS


def slots(*names):
    return read_slots(names)


def node(name, places=2, port=1, gpus=()):
    return LentNode(Node(name, places, "cpu", num_cpus=4.0), ("127.0.0.1", port), gpus)


def launch(**counts):
    return Launch("job", 1, Placement.of(counts), ("python", "x.py"), "/")


@pytest.fixture
def lender():
    return PooledNodeProvider()


@pytest.fixture
def backend(tmp_path, lender):
    made = FleetBackend(tmp_path, lender, "test", head="127.0.0.1", warm=False)
    made.told = []
    made.start(made.told.append)
    yield made
    made.close()


def wait(is_so):
    import time

    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_nodes_come_and_go(backend, lender):
    lender.offer([node("a"), node("b")])
    wait(lambda: len(backend.told) == 2)
    assert [(type(event), event.node.id) for event in backend.told] == [(NodeUp, "a"), (NodeUp, "b")]
    lender.offer([node("b", 3)])
    wait(lambda: len(backend.told) == 4)
    assert [type(event) for event in backend.told[2:]] == [NodeUp, NodeDown]
    assert [each.num_gpus for each in backend.inventory()] == [3]


def test_a_new_host_of_a_node_is_a_new_node(backend, lender):
    lender.offer([node("a")])
    lender.offer([node("a", port=2)])
    wait(lambda: [type(event) for event in backend.told][-2:] == [NodeDown, NodeUp] or len(backend.told) == 1)


class TakingBack(PooledNodeProvider):
    """One whose engine takes nodes back: `goes` are those, with why."""

    def __init__(self):
        super().__init__()
        self.goes = {}

    def leaving(self):
        return self.goes

    def take_back(self, **goes):
        self.goes = goes
        self._changed()


@pytest.fixture
def taking(tmp_path):
    lender = TakingBack()
    backend = FleetBackend(tmp_path, lender, "test", head="127.0.0.1", warm=False)
    told: list[object] = []
    backend.start(told.append)
    lender.offer([node("a"), node("b")])
    wait(lambda: len(told) == 2)
    yield backend, lender, told
    backend.close()


def test_a_node_that_leaves_is_down_for_whoever_decides_and_up_where_it_stays(taking):
    backend, lender, told = taking
    lender.take_back(a="drained")
    wait(lambda: len(told) == 3)
    assert (type(told[2]), told[2].node_id) == (NodeDown, "a")
    assert [each.id for each in backend.inventory()] == ["b"]
    lender.take_back()
    wait(lambda: len(told) == 4)
    assert (type(told[3]), told[3].node.id) == (NodeUp, "a")
    assert [each.id for each in backend.inventory()] == ["a", "b"]


def test_a_node_that_has_left_is_told_once_and_not_up_while_it_goes(taking):
    _, lender, told = taking
    lender.take_back(a="drained")
    wait(lambda: len(told) == 3)
    lender.offer([node("a", 3), node("b")])
    lender.offer([node("b")])
    lender.goes = {}
    lender.offer([node("b"), node("c")])
    wait(lambda: len(told) == 4)
    assert (type(told[3]), told[3].node.id) == (NodeUp, "c"), "nothing more was to be said of the first"
    lender.offer([node("a"), node("b"), node("c")])
    wait(lambda: len(told) == 5)
    assert (type(told[4]), told[4].node.id) == (NodeUp, "a")


def test_nodes_from_before_count_until_the_lender_has_found_them(tmp_path):
    first = PooledNodeProvider()
    backend = FleetBackend(tmp_path, first, head="127.0.0.1", warm=False)
    told: list[object] = []
    backend.start(told.append)
    first.offer([node("a"), node("b")])
    wait(lambda: len(told) == 2)
    backend.close()
    second, told = PooledNodeProvider(), []
    backend = FleetBackend(tmp_path, second, head="127.0.0.1", warm=False)
    backend.start(told.append)
    assert [each.id for each in backend.inventory()] == ["a", "b"]
    second.offer([node("a"), node("b"), node("c")])
    wait(lambda: told)
    assert [event.node.id for event in told] == ["c"]
    backend.close()


def test_what_was_noted_by_another_version_is_left_out(tmp_path, caplog):
    good = {"id": "a", "num_gpus": 2, "gpu_type": "cpu"}
    rows = [
        {"node": good, "address": ["127.0.0.1", 1], "gpus": []},
        {"node": {**good, "id": "b", "colour": "red"}, "address": ["127.0.0.1", 1], "gpus": []},
        {"node": {**good, "id": "c", "num_gpus": -1}, "address": ["127.0.0.1", 1], "gpus": []},
        {"node": {**good, "id": "d"}, "address": ["127.0.0.1"], "gpus": []},
        {"node": {**good, "id": "e"}, "address": ["127.0.0.1", 1], "gpus": 5},
        {"node": ["f"]},
        7,
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fleet-nodes.json").write_text(json.dumps({"nodes": rows}))
    backend = FleetBackend(tmp_path, PooledNodeProvider(), head="127.0.0.1", warm=False)
    with caplog.at_level("WARNING", "pollux.backends"):
        backend.start(lambda event: None)
    try:
        assert [each.id for each in backend.inventory()] == ["a"]
    finally:
        backend.close()
    (warning,) = [record.getMessage() for record in caplog.records if "fleet-nodes.json" in record.getMessage()]
    assert "6 of the nodes" in warning


@pytest.mark.parametrize("text", ['{"nodes": 5}', '{"nodes": {"a": 1}}', "[]", "no record"])
def test_notes_that_are_none_are_as_if_there_were_none(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fleet-nodes.json").write_text(text)
    backend = FleetBackend(tmp_path, PooledNodeProvider(), head="127.0.0.1", warm=False)
    backend.start(lambda event: None)
    backend.close()
    assert backend.inventory() == ()


def test_what_cannot_be_placed_is_refused(backend, lender):
    lender.offer([node("a")])
    with pytest.raises(BackendFailed, match="no node 'z'; nodes now: a"):
        backend.submit(launch(a=1, z=1))
    with pytest.raises(BackendFailed, match="'a' has 2 places"):
        backend.submit(launch(a=3))
    with pytest.raises(BackendFailed, match="empty placement"):
        backend.submit(launch())
    assert backend.running() == ()


def test_every_replica_knows_its_ranks(backend, lender):
    lender.offer([node("a", gpus=(4, 6)), node("b", gpus=(0, 1))])
    details = backend._slots.details(launch(a=2, b=1), slots("a/0", "a/1", "b/0"), "run")
    ranks = [each["RANK"] + each["LOCAL_RANK"] + each["NODE_RANK"] for each in details.replicas]
    assert ranks == ["000", "110", "201"]
    assert {**details.environ, **details.replicas[0]}["MASTER_ADDR"] == "127.0.0.1"


def test_the_lease_is_shorter_than_patience(tmp_path, lender, monkeypatch):
    with pytest.raises(InvalidInput, match="nothing runs twice"):
        FleetBackend(tmp_path, lender, lease_seconds=5.0, lost_seconds=5.0)
    monkeypatch.setenv("POLLUX_LOST_SECONDS", "soon")
    with pytest.raises(InvalidInput, match="POLLUX_LOST_SECONDS is 'soon'"):
        FleetBackend(tmp_path, lender)


def test_the_secret_is_made_once_and_kept_private(tmp_path):
    secret = fleet_secret(tmp_path)
    assert len(secret) == 32
    assert fleet_secret(tmp_path) == secret
    path = tmp_path / "run" / "fleet.secret"
    assert path.stat().st_mode & 0o077 == 0
    assert [each.name for each in path.parent.iterdir()] == ["fleet.secret"]
    path.write_text("no secret")
    with pytest.raises(BackendFailed, match="cannot be used"):
        fleet_secret(tmp_path)


def test_there_is_always_an_address():
    assert own_address()


@pytest.fixture
def ground(lender):
    lender.offer([node("a", gpus=(4, 6)), node("b")])
    return FleetSlotAllocator(lender, b"x" * 16, "10.0.0.1", 10.0, 12.0)


def test_places_that_stay_come_first(ground, lender):
    first = ground.allocate("job", Placement.of({"a": 2}), (), ())
    assert first == slots("a/0", "a/1")
    second = ground.allocate("job", Placement.of({"b": 1, "a": 1}), slots("a/1", "a/0"), slots("a/1", "a/0"))
    assert second == slots("a/1", "b/0")
    ground.release_except("job", second)
    assert lender.held("job") == {"a": (1,), "b": (0,)}
    assert ground.placement(second) == Placement.of({"a": 1, "b": 1})


def test_places_of_the_dead_are_used_again(ground):
    ground.allocate("job", Placement.of({"a": 2}), (), ())
    assert ground.allocate("job", Placement.of({"a": 2}), slots("a/1"), slots("a/1")) == slots("a/1", "a/0")


def test_what_is_held_by_others_is_waited_for_and_what_is_gone_is_not(ground, lender):
    ground.allocate("other", Placement.of({"b": 2}), (), ())
    assert ground.allocate("job", Placement.of({"b": 1}), (), ()) == ()
    assert ground.refused("job", Placement.of({"b": 1}), ()) == ("", ())
    lender.offer([node("a")])
    why, names = ground.refused("job", Placement.of({"a": 1, "b": 1}), slots("a/0"))
    assert "'b' is gone" in why
    assert names == slots("a/0", "gone:b/0")


def test_an_order_names_only_its_own_nodes(ground):
    details = ground.details(launch(a=1), slots("a/1"), "id")
    assert details.fleet.nodes == {"a": ("127.0.0.1", 1)}
    assert details.gpus == {"a/1": 6}
    assert details.environ["MASTER_ADDR"] == "10.0.0.1"
    assert "GLOO_SOCKET_IFNAME" not in details.environ


def test_a_thousand_hosts_cost_a_quiet_turn_nothing(backend, lender):
    """No call for each node, and none for each job, where nothing changed."""
    lender.offer([node(f"n{number}") for number in range(1000)])
    wait(lambda: len(backend.told) == 1000)
    calls: list[str] = []

    def held(job):
        calls.append(job)
        return {}

    lender.held = held
    listed = backend._slots.hosts
    for _ in range(100):
        backend._dispatcher.thread.wake()
    assert backend._slots.hosts is listed
    assert calls == []


def test_what_is_degraded_is_in_the_log_once(backend, caplog):
    work = backend._watch
    said = ["node 'n1' waits 5 s", "node 'n2' waits 5 s"]
    with caplog.at_level("WARNING", "pollux.backends"):
        work._log_warnings(lambda: said)
        work._log_warnings(lambda: ["node 'n1' waits 61.5 s", "node 'n2' waits 7 s"])
        work._log_warnings(tuple)
        work._log_warnings(lambda: said[:1])
    texts = [record.getMessage() for record in caplog.records]
    assert sorted(texts) == ["degraded: node 'n1' waits 5 s"] * 2 + ["degraded: node 'n2' waits 5 s"]


def test_what_an_overtaken_order_asked_for_is_left_to_others(lender):
    """Growth that waits for another job's place is called off: that place must not come to it all the same."""
    lender.offer([node("a", 1), node("b", 1)])
    ground = FleetSlotAllocator(lender, b"secret", "127.0.0.1", 10.0, 12.0)
    assert ground.allocate("leaving", Placement.of({"b": 1}), (), ()) == slots("b/0")
    assert ground.allocate("grows", Placement.of({"a": 1}), (), ()) == slots("a/0")
    assert ground.allocate("grows", Placement.of({"a": 1, "b": 1}), slots("a/0"), slots("a/0")) == ()
    assert ground.allocate("grows", Placement.of({"a": 1}), slots("a/0"), slots("a/0")) == slots("a/0")
    ground.release_except("grows", slots("a/0"))
    assert ground.allocate("next", Placement.of({"b": 1}), (), ()) == ()
    ground.release_except("leaving", ())
    assert lender.held("grows") == {"a": (0,)}
    assert ground.allocate("next", Placement.of({"b": 1}), (), ()) == slots("b/0")
