import math

import pytest

from pollux.core import NOWHERE, Cluster, Node, Queue, Reason
from pollux.policies.packing.capacity import Room
from pollux.testing import cluster, job, place, snapshot


def test_spread_takes_from_the_emptiest_node_and_the_first_among_equals():
    room = Room(snapshot(cluster(2, 4, 4)))
    assert room.spread(job("a"), 3) == place("n1:3")
    assert room.spread(job("a"), 6) == place("n1:4 n2:2")
    room.take(job("a"), place("n1:3"))
    assert room.spread(job("b"), 6) == place("n2:4 n0:2")
    assert room.spread(job("b"), 8) == NOWHERE


def test_what_was_taken_can_be_given_back():
    nodes = cluster(4, num_cpus=8, memory_bytes=8)
    room = Room(snapshot(nodes, queues=[Queue("q", gpu_quota=4)]))
    view = job("a", cpus_per_gpu=2, memory_bytes_per_gpu=2, queue="q")
    room.take(view, place("n0:3"))
    assert (room.available(view, "n0"), room.quota("q"), room.num_free) == (1, 1, 1)
    room.give(view, place("n0:3"))
    assert (room.available(view, "n0"), room.quota("q"), room.num_free) == (4, 4, 4)


def test_cpus_and_memory_bound_what_is_available():
    room = Room(snapshot(Cluster.of([Node("n0", 8, num_cpus=10, memory_bytes=100)])))
    assert room.available(job("a", cpus_per_gpu=3), "n0") == 3
    assert room.available(job("a", memory_bytes_per_gpu=30), "n0") == 3
    assert room.available(job("a", cpus_per_gpu=1, memory_bytes_per_gpu=51), "n0") == 1
    assert room.available(job("a"), "n0") == 8
    room.take(job("a", cpus_per_gpu=10), place("n0:1"))
    assert room.available(job("b", cpus_per_gpu=0.5), "n0") == 0
    assert room.available(job("b"), "n0") == 7


def test_thirds_of_a_node_fit_three_times():
    room = Room(snapshot(cluster(3, num_cpus=0.3, memory_bytes=1e11)))
    view = job("a", cpus_per_gpu=0.1, memory_bytes_per_gpu=1e11 / 3)
    for _ in range(3):
        assert room.available(view, "n0") >= 1
        room.take(view, place("n0:1"))
    assert room.available(view, "n0") == 0


def test_a_closed_node_offers_nothing_but_lets_stay():
    room = Room(snapshot(Cluster.of([Node("n0", 8, schedulable=False), Node("n1", 2)])))
    assert room.available(job("a"), "n0") == 0
    assert room.num_free == 2
    assert room.spread(job("a"), 3) == NOWHERE
    assert room.can_keep(job("a"), place("n0:4"))


def test_one_type_at_a_time_unless_mixed():
    nodes = Cluster.of([Node("a0", 2, "a100"), Node("t0", 3, "t4"), Node("a1", 2, "a100")])
    room = Room(snapshot(nodes))
    assert room.spread(job("j"), 4) == place("a0:2 a1:2")
    assert room.spread(job("j", gpu_types=("t4",)), 3) == place("t0:3")
    assert room.spread(job("j"), 5) == NOWHERE
    assert room.spread(job("j", mixed_types=True), 5) == place("t0:3 a0:2")
    assert room.spread(job("j", mixed_types=True, gpu_types=("a100",)), 5) == NOWHERE


def test_most_is_what_spread_can_give():
    nodes = Cluster.of([Node("a0", 2, "a100"), Node("t0", 3, "t4"), Node("a1", 2, "a100")])
    room = Room(snapshot(nodes, queues=[Queue("q", gpu_quota=1)]))
    for view, most in [
        (job("j"), 4),
        (job("j", max_nodes=1), 3),
        (job("j", max_gpus=2), 2),
        (job("j", mixed_types=True), 7),
        (job("j", mixed_types=True, max_nodes=2), 5),
        (job("j", queue="q"), 1),
        (job("j", gpu_types=("h100",)), 0),
    ]:
        assert room.most(view) == most
        assert not room.spread(view, most + 1) or view.limits.max_gpus == most
        assert most == 0 or room.spread(view, most).num_gpus == most


def test_nodes_spanned():
    room = Room(snapshot(cluster(2, 2, 4)))
    assert room.spread(job("j", max_nodes=1), 4) == place("n2:4")
    assert room.spread(job("j", max_nodes=1), 5) == NOWHERE
    assert room.spread(job("j", max_nodes=2), 5) == place("n2:4 n0:1")


def test_quota_bounds_spread():
    room = Room(snapshot(cluster(4), queues=[Queue("q", gpu_quota=2)]))
    assert room.quota("other") == math.inf
    assert room.spread(job("j", queue="q"), 3) == NOWHERE
    assert room.spread(job("j", queue="q"), 2) == place("n0:2")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"min_gpus": 3}, "n0:2"),
        ({"max_gpus": 1}, "n0:2"),
        ({"max_nodes": 1}, "n0:1 n1:1"),
        ({"gpu_types": ("t4",)}, "n0:2"),
        ({}, "n0:1 t0:1"),
        ({}, "n0:5"),
        ({}, "gone:1"),
        ({"cpus_per_gpu": 5.0}, "n0:2"),
        ({"queue": "q"}, "n0:2"),
        ({"pinned": True, "min_gpus": 1}, ""),
    ],
)
def test_what_cannot_be_kept(fields, where):
    nodes = Cluster.of([Node("n0", 4, num_cpus=8), Node("n1", 4), Node("t0", 4, "t4")])
    room = Room(snapshot(nodes, queues=[Queue("q", gpu_quota=1)]))
    assert not room.can_keep(job("j", **fields), place(where))


def test_a_pinned_job_keeps_what_it_has():
    assert Room(snapshot(cluster(1))).can_keep(job("j", pinned=True, max_gpus=1), place("n0:2 gone:1"))


def test_part_keeps_the_largest_shares():
    room = Room(snapshot(cluster(4, 4, 4)))
    assert room.part(job("j"), place("n0:1 n1:3 n2:2"), 4) == place("n1:3 n2:1")
    assert room.part(job("j", min_gpus=3), place("n0:1 n1:3"), 2) == NOWHERE
    assert room.part(job("j"), place("n0:1"), 2) == NOWHERE


def test_part_leaves_what_is_gone():
    assert Room(snapshot(cluster(1, 4))).part(job("j"), place("n0:4 n1:2 gone:3"), 3) == place("n0:1 n1:2")


def test_refusals_say_why():
    room = Room(snapshot(cluster(4), queues=[Queue("q", gpu_quota=3)]))
    room.take(job("a", queue="q"), place("n0:1"))
    room.take(job("b"), place("n0:2"))
    assert room.refusal(job("j"), 2) == Reason("waits-for-gpus", {"gpus": 2, "free_gpus": 1})
    assert room.refusal(job("j", queue="q"), 3) == Reason("waits-for-quota", {"gpus": 3, "quota_left": 2})
    assert room.refusal(job("j"), 1) == Reason("no-room", {"gpus": 1, "free_gpus": 1})
    assert room.refusal(job("j", queue="q"), 4) == Reason("fits-nowhere", {"gpus": 4, "queue_quota": 3})


def test_more_held_than_there_is_leaves_nothing_and_breaks_nothing():
    room = Room(snapshot(cluster(1, 4)))
    room.take(job("a"), place("n0:3"))
    assert room.num_free == 4
    assert room.available(job("b"), "n0") == 0
    assert room.spread(job("b"), 5) == NOWHERE
