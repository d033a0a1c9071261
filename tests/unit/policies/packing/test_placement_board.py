"""Finding room, clearing it at the least cost, and taking back what did not work."""

import math

import pytest

from pollux.core import Node
from pollux.policies.packing.placement_board import PlacementBoard
from pollux.testing import job


def board(free_nodes, jobs=8, avoid=True, **limits) -> PlacementBoard:
    nodes = [Node(f"n{i}", gpus) for i, gpus in enumerate(free_nodes)]
    return PlacementBoard(nodes, [job(f"j{i}", **limits) for i in range(jobs)], avoid)


def test_the_tightest_node_that_fits_is_taken():
    it = board([4, 4, 4])
    it.put(0, ((0, 1),))
    it.put(1, ((1, 2),))
    assert it.place(2, 2, "", (), 0.0) == 0.0
    assert it.shares[2] == ((1, 2),)
    assert it.place(3, 1, "", (), 0.0) == 0.0
    assert it.shares[3] == ((0, 1),)


def test_its_own_node_comes_first():
    it = board([4, 4, 4])
    it.place(0, 2, "", ((2, 1),), 0.0)
    assert it.shares[0] == ((2, 2),)


def test_a_large_job_takes_whole_nodes():
    it = board([4, 4, 4, 4])
    it.put(0, ((0, 1),))
    assert it.place(1, 12, "", (), 0.0) == 0.0
    assert it.shares[1] == ((1, 4), (2, 4), (3, 4))


def test_the_cheapest_jobs_make_way():
    it = board([4, 4])
    for j, shares in enumerate([((0, 2),), ((1, 1),), ((1, 1),)]):
        it.put(j, shares)
    it.move_cost[0], it.move_cost[1], it.move_cost[2] = 5.0, 1.0, 1.0
    assert it.place(3, 4, "", (), budget=10.0) == 2.0
    assert it.shares[3] == ((1, 4),)
    assert it.shares[1] == it.shares[2] == ((0, 1),)


def test_nobody_moves_for_less_than_it_costs():
    it = board([4, 4])
    it.put(0, ((0, 2),))
    it.put(1, ((1, 2),))
    it.move_cost[0] = it.move_cost[1] = 5.0
    before = list(it.shares)
    assert it.place(2, 4, "", (), budget=4.0) is None
    assert it.shares == before
    assert it.place(2, 4, "", (), budget=6.0) == 5.0


def test_immovable_jobs_stay():
    it = board([4])
    it.put(0, ((0, 1),))
    it.move_cost[0] = math.inf
    assert it.place(1, 4, "", (), budget=math.inf) is None


def test_what_cannot_be_finished_is_taken_back():
    """Room could be cleared, but the one who leaves finds no other place."""
    it = board([4, 4])
    it.put(0, ((0, 2),))
    it.put(1, ((1, 3),))
    it.move_cost[0] = it.move_cost[1] = 0.0
    before = list(it.shares), list(it.free)
    assert it.place(2, 4, "", (), budget=1.0) is None
    assert (list(it.shares), list(it.free)) == before


def test_two_distributed_jobs_do_not_share_a_node():
    it = board([4, 4, 4])
    it.put(0, ((0, 4), (1, 2)))
    assert it.place(1, 6, "", (), 0.0) is None
    assert not it.usable(1, ((1, 2), (2, 2)))
    apart = board([4, 4, 4], avoid=False)
    apart.put(0, ((0, 4), (1, 2)))
    assert apart.usable(1, ((1, 2), (2, 2)))


def test_a_node_that_isolates_traffic_may_be_shared():
    nodes = [Node("n0", 4), Node("n1", 4, isolated_network=True), Node("n2", 4)]
    it = PlacementBoard(nodes, [job("a"), job("b")], True)
    it.put(0, ((0, 4), (1, 2)))
    assert it.usable(1, ((1, 2), (2, 4)))


def test_one_node_jobs_share_with_a_distributed_one():
    it = board([4, 4])
    it.put(0, ((0, 4), (1, 2)))
    assert it.place(1, 2, "", (), 0.0) == 0.0
    assert it.shares[1] == ((1, 2),)


def test_scattered_gpus_serve_a_job_that_waits():
    it = board([2, 2, 2])
    it.put(0, ((0, 1),))
    it.put(1, ((1, 1),))
    it.put(2, ((2, 1),))
    assert it.scatter(3, 3, "")
    assert sorted(it.shares[3]) == [(0, 1), (1, 1), (2, 1)]
    assert not it.scatter(4, 1, "")


def test_scattering_honours_the_most_nodes_of_a_job():
    it = board([1, 1, 1], max_nodes=2)
    assert not it.scatter(0, 3, "")
    assert it.scatter(0, 2, "")


def test_closed_nodes_take_nobody_new():
    nodes = [Node("n0", 4, schedulable=False), Node("n1", 2)]
    it = PlacementBoard(nodes, [job("a"), job("b")], True)
    it.put(0, ((0, 2),))
    assert it.place(1, 4, "", (), 1.0) is None
    assert it.place(1, 2, "", ((0, 2),), 1.0) == 0.0
    assert it.shares[1] == ((1, 2),)


def test_cpus_and_memory_count_as_well():
    nodes = [Node("n0", 4, num_cpus=4.0), Node("n1", 4, num_cpus=8.0)]
    it = PlacementBoard(nodes, [job("a", cpus_per_gpu=2.0), job("b", cpus_per_gpu=2.0)], True)
    assert it.place(0, 3, "", (), 0.0) == 0.0
    assert it.shares[0] == ((1, 3),)
    assert it.room_on(1, 0) == 2
    assert it.place(1, 3, "", (), 0.0) is None


def test_quotas_are_kept_count_of():
    nodes = [Node("n0", 8)]
    it = PlacementBoard(nodes, [job("a", queue="q"), job("b", queue="q"), job("c")], True, {"q": 5})
    it.put(0, ((0, 3),))
    assert it.quota_left(1) == 2
    assert it.quota_left(0) == 5
    assert it.quota_left(2) == math.inf


def test_undo_returns_to_the_mark():
    it = board([4, 4])
    it.put(0, ((0, 2),))
    mark = it.mark()
    it.put(0, ())
    it.put(1, ((0, 4),))
    it.undo(mark)
    assert it.shares[0] == ((0, 2),)
    assert it.shares[1] == ()
    assert it.free == [2, 4]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_full_nodes_say_no(count):
    it = board([4])
    it.put(0, ((0, 4),))
    it.move_cost[0] = math.inf
    assert it.place(1, count, "", (), math.inf) is None
