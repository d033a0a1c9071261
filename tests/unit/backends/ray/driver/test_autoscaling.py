"""What the autoscaler is asked for, and the hosts of nodes that nobody needs."""

import pytest

from pollux.backends.ray.driver_messages import DesireNodes, NodesMessage, ReleaseHosts, TakeClaims


def spare(ray, driver):
    """All hosts are up, and those of nodes that were not needed for long are asked whether they work."""
    for actor in ray.actors:
        ray.report(actor)
    ray.settle(driver)
    for actor in ray.actors:
        ray.ask_anew(actor)
    driver.find_nodes()
    ray.now += 15.0
    driver.find_nodes()


def test_hosts_beyond_the_wish_are_ended_so_that_ray_may_end_their_nodes(ray, make):
    driver, told = make(claims={"pollux:s:job:0": "host-bbbbbb"}, desired=1)
    spare(ray, driver)
    ray.report(ray.actors[0])
    ray.settle(driver)
    assert ray.killed == [ray.actors[0]]
    driver.find_nodes()
    assert [node.name for node in told.of(NodesMessage)[-1].nodes] == ["host-bbbbbb"], "the one with a claim stays"
    driver.obey(DesireNodes(2))
    driver.find_nodes()
    assert [node.name for node in told.of(NodesMessage)[-1].nodes] == ["host-aaaaaa", "host-bbbbbb"]
    assert ray.actors[-1].given[0] == "host-aaaaaa", "who is needed again gets another host"


def test_while_a_job_waits_every_node_is_needed(ray, make):
    driver, told = make(desired=0)
    spare(ray, driver)
    for actor in ray.actors[:2]:
        ray.report(actor)
    ray.settle(driver)
    assert told.of(NodesMessage)[-1].nodes == ()
    # Which of them suits it, and which is broken, is not known here.
    driver.obey(DesireNodes(1, awaited=True))
    driver.find_nodes()
    assert [node.name for node in told.of(NodesMessage)[-1].nodes] == ["host-aaaaaa", "host-bbbbbb"]


def test_of_nodes_that_nobody_uses_the_large_ones_that_are_up_stay(ray, make):
    ray.rows = [ray.row("a", 1), ray.row("b"), ray.row("c", 8)]
    driver, _ = make(desired=1)
    ray.report(ray.actors[0], places=1)
    ray.report(ray.actors[1])
    ray.settle(driver)
    for actor in ray.actors[:2]:
        ray.ask_anew(actor)
    driver.find_nodes()
    ray.now += 15.0
    driver.find_nodes()
    ray.report(ray.actors[0], places=1)
    ray.settle(driver)
    assert ray.killed == [ray.actors[0]], "the host of the largest one is not up as yet"


@pytest.mark.parametrize("why", ["it works", "a claim came", "it is wished for again", "nobody said what is wished"])
def test_a_host_that_is_needed_after_all_stays(ray, make, why):
    driver, told = make(desired=None if why == "nobody said what is wished" else 1)
    spare(ray, driver)
    if why == "a claim came":
        driver.obey(TakeClaims({"pollux:s:job:0": "host-bbbbbb"}))
    elif why == "it is wished for again":
        driver.obey(DesireNodes(2))
        driver.find_nodes()
    ray.report(ray.actors[1], works=why == "it works")
    ray.settle(driver)
    driver.find_nodes()
    assert ray.killed == []
    assert len(told.of(NodesMessage)) == 1, "no node came or went"


def test_the_autoscaler_is_asked_for_whole_nodes(ray, make):
    driver, _ = make()
    driver.obey(DesireNodes(3))
    driver.obey(DesireNodes(0))
    assert ray.wishes == [[{"GPU": 4}] * 3, []]


def test_a_wish_of_before_is_repeated_and_made_anew_when_nodes_turn_out_larger(ray, make):
    ray.rows = []
    driver, _ = make(desired=2)
    assert ray.wishes == [[{"GPU": 1}] * 2]
    ray.rows = [ray.row("a", 8)]
    driver.find_nodes()
    ray.rows = []
    driver.find_nodes()
    assert ray.wishes[1:] == [[{"GPU": 8}] * 2]


def test_at_the_end_of_all_hosts_are_told_and_the_wish_is_taken_back(ray, make):
    driver, _ = make(desired=2)
    driver.obey(ReleaseHosts())
    assert ray.wishes == [[{"GPU": 4}] * 2, []]
    assert ray.awaited == [actor.refs["release"] for actor in ray.actors]


def test_who_never_had_a_wish_takes_none_back(ray, make):
    driver, _ = make()
    driver.obey(ReleaseHosts())
    assert ray.wishes == []
