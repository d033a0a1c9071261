import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from pollux.agent.elastic import membership as module
from pollux.agent.elastic.membership import Membership, connect
from pollux.core.errors import InvalidInput, Unreachable
from pollux.wire.live import keys
from pollux.wire.live.plan import GenerationPlan, PlanMember
from pollux.wire.live.store_channel import SECRET_VARIABLE


def plan(generation, before, *was, why="resize"):
    return GenerationPlan(generation, before, tuple(PlanMember(rank, old) for rank, old in enumerate(was)), why=why)


@pytest.fixture
def store():
    return dist.HashStore()


def committed(store, *plans):
    live = dist.PrefixStore(keys.PREFIX, store)
    for each in plans:
        live.set(keys.plan(each.generation), each.encode())
    live.set(keys.COMMITTED, str(plans[-1].generation))
    return live


def test_nothing_is_wanted_before_anything_is_committed(store):
    mine = Membership(store, 3, 0)
    assert mine.committed() == -1
    assert mine.newest() is None


def test_replicas_go_to_the_newest_that_counts_from_where_they_are(store):
    mine: Any = Membership(store, 0, 1)
    committed(store, plan(1, 0, 0, 1, None))
    assert mine.newest().generation == 1
    committed(store, plan(2, 0, 0, 1))
    assert mine.newest().generation == 2
    # One that counts from a generation this replica has not been in comes after the one that leads there.
    committed(store, plan(3, 2, 0, 1, None, None))
    assert mine.newest().generation == 2
    mine.note_rank(mine.newest(), 1)
    assert mine.newest().generation == 3
    mine.generation = 3
    assert mine.newest() is None, "never back"


def test_a_plan_that_was_withdrawn_says_nothing(store):
    mine: Any = Membership(store, 0, 1)
    live = committed(store, plan(1, 0, 0, 1, None))
    live.set(keys.withdrawn(1), "nobody came")
    assert mine.newest() is None
    committed(store, plan(2, 0, 0, 1))
    assert mine.newest().generation == 2


def test_what_the_first_says_of_a_generation_holds(store):
    one, other = Membership(store, 0, 0), Membership(store, 0, 1)
    assert one.decide(1, "open") == other.decide(1, "shut") == "open"
    assert other.decide(2, "shut") == one.decide(2, "open") == "shut"


def test_what_the_supervisor_and_other_replicas_say_is_read(store):
    mine = Membership(store, 2, 1)
    mine.fail(3, "why")
    live = dist.PrefixStore(keys.PREFIX, store)
    assert mine.has_failed(3) == live.get(keys.failed(3)).decode() == "why"
    assert mine.has_failed(2) is None
    live.set(keys.lost(2), "[0, 3]")
    assert mine.lost(2) == {0, 3}
    assert mine.lost(1) == frozenset()
    live.set(keys.withdrawn(3), "late")
    assert mine.withdrawn(3) == "late"


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "{}", '"x"', "x" * (2 << 20), "1e999", "NaN"])
def test_a_malformed_value_is_ignored_with_one_line(store, text, caplog):
    mine = Membership(store, 0, 0)
    live = dist.PrefixStore(keys.PREFIX, store)
    for key in (keys.COMMITTED, keys.plan(1), keys.lost(0), keys.ends(0, 0)):
        live.set(key, text)
    live.set(keys.FACTS, "[]")
    for _ in range(3):
        assert mine.committed() == -1
    assert len(caplog.records) == 1
    assert (mine.plan(1), mine.lost(0), mine.ends(0, 1), mine.facts()) == (None, frozenset(), frozenset(), {})
    assert mine.newest() is None


def test_a_generation_that_is_far_too_large_is_not_searched_for(store):
    mine = Membership(store, 0, 0)
    live = committed(store, plan(1, 0, 0))
    live.set(keys.COMMITTED, "99999999999")
    assert mine.newest() is None


def test_the_door_opens_when_all_members_are_there(store):
    change = plan(1, 0, 0, None)
    mine = Membership(store, 0, 0)
    mine.write(keys.here(1, 0))
    assert not mine.are_here(change)
    mine.write(keys.here(1, 1))
    assert mine.are_here(change)


def test_those_that_hand_over_come_to_the_door_too(store):
    change = GenerationPlan(1, 0, (PlanMember(0, None),), senders=(0, 2))
    mine = Membership(store, 0, 0)
    assert [change.place_of_sender(was) for was in range(3)] == [1, None, 2]
    for what, is_so in ((keys.here, mine.are_here), (keys.received, mine.have_received)):
        for number in (0, 2):
            mine.write(what(1, number))
        assert not is_so(change)
        mine.write(what(1, 1))
        assert is_so(change)
    assert not mine.is_handed_over(1)
    dist.PrefixStore(keys.PREFIX, store).set(keys.handed(1), "")
    assert mine.is_handed_over(1)


def test_facts_are_shared(store):
    mine = Membership(store, 0, 0)
    assert mine.facts() == {}
    mine.share_facts({"batch_size": 8})
    assert mine.facts() == {"batch_size": 8}


def test_the_first_that_is_left_is_the_one_to_save(store):
    first, second, third = (Membership(store, 4, rank) for rank in range(3))
    live = dist.PrefixStore(keys.PREFIX, store)
    assert not second.is_first_left(0.0), "nothing is known of the first"
    live.set(keys.lost(4), "[0]")
    assert not third.is_first_left(0.0)
    assert second.is_first_left(0.0)
    began = time.monotonic()
    assert not third.is_first_left(60.0), "the second has said that it saves"
    assert time.monotonic() - began < 30.0
    live.set(keys.lost(4), "[0, 1]")
    assert third.is_first_left(0.0)
    assert first.is_first_left(0.0)


def test_the_end_of_another_may_be_heard_of_a_little_later(store):
    live = dist.PrefixStore(keys.PREFIX, store)
    timer = threading.Timer(0.1, lambda: live.set(keys.lost(4), "[0]"))
    timer.start()
    assert Membership(store, 4, 1).is_first_left(30.0)
    timer.join()


def test_waiting_ends_with_what_is_seen_or_at_the_deadline():
    seen = iter([None, None, "it"])
    assert Membership.wait(lambda: next(seen), 60.0) == "it"
    now = iter([0.0, 1.0, 2.0, 3.0])
    assert Membership.wait(lambda: None, 2.0, clock=lambda: next(now)) is None


def test_a_generation_that_has_no_plan_is_never_committed(store, caplog):
    """However far it seems to be: nobody looks for the plans in between."""
    mine: Any = Membership(store, 0, 1)
    live = committed(store, plan(1, 0, 0, 1))
    asked: list[int] = []
    mine.plan = asked.append
    for _ in range(2):
        live.set(keys.COMMITTED, "99999999999")
        assert mine.newest() is None
    assert asked == []
    assert [record.getMessage() for record in caplog.records] == [
        "the job's store calls generation 99999999999 committed, but has no plan for it: ignored"
    ]


def test_a_process_has_one_client(hosted_store, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, hosted_store.access.encode())
    client = connect(hosted_store.access.address, 5.0)
    assert connect(hosted_store.access.address, 5.0) is client
    client.close()
    module._clients.clear()


@pytest.mark.parametrize("address", ["", "7000", "host:", "host:x", "127.0.0.1:7000"])
def test_an_address_that_has_no_secret_is_refused(address, monkeypatch):
    for variable in ("", f"127.0.0.1:7001 {'00' * 32}"):
        monkeypatch.setenv(SECRET_VARIABLE, variable)
        with pytest.raises(InvalidInput, match="POLLUX_STORE"):
            connect(address, 1.0)


@pytest.mark.parametrize("variable", ["here", "host:x 00", "h:1 00", f"h:0 {'00' * 32}", "h:1 zz"])
def test_a_secret_that_is_none_is_refused(variable, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, variable)
    with pytest.raises(InvalidInput, match="POLLUX_STORE_SECRET"):
        connect("h:1", 1.0)


def test_a_store_that_is_not_there_is_told(free_port, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, f"127.0.0.1:{free_port} {'00' * 32}")
    with pytest.raises(Unreachable, match=f"127.0.0.1:{free_port}"):
        connect(f"127.0.0.1:{free_port}", 0.5)


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
