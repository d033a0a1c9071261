"""The actors that keep the hosts of nodes."""

import pytest

from pollux.backends.ray.driver_messages import HostGoneMessage, HostMessage, HostReport, NodesMessage
from pollux.backends.ray.node_actor import secret_digest


def test_every_node_gets_an_actor_of_its_own(ray, make):
    driver, told = make()
    assert [actor.options["scheduling_strategy"] for actor in ray.actors] == [("a" * 56, False), ("b" * 56, False)]
    assert all(actor.options["lifetime"] == "detached" for actor in ray.actors)
    assert all(actor.options["num_cpus"] == 0 and actor.options["get_if_exists"] for actor in ray.actors)
    assert [node.name for node in told.of(NodesMessage)[0].nodes] == ["host-aaaaaa", "host-bbbbbb"]
    ray.report(ray.actors[0])
    ray.settle(driver)
    assert told.of(HostMessage) == [HostMessage("host-aaaaaa", HostReport(("10.0.0.1", 7), (0, 1, 2, 3)))]


def test_a_host_that_ends_is_told_and_started_again(ray, make):
    driver, told = make()
    ray.report(ray.actors[0])
    ray.settle(driver)
    ray.actors[0].refs["watch"].done.set_exception(RuntimeError("long story\nthe actor died"))
    ray.settle(driver)
    assert told.of(HostGoneMessage) == [
        HostGoneMessage("host-aaaaaa", "the host of node 'host-aaaaaa' ended (the actor died)")
    ]
    ray.now += 16.0
    driver.find_nodes()
    assert len(ray.actors) == 3


def test_a_question_that_was_asked_long_enough_is_asked_again(ray, make):
    driver, told = make()
    ray.report(ray.actors[0])
    ray.settle(driver)
    first = ray.actors[0].refs["watch"]
    ray.watch_anew(ray.actors[0])
    first.done.set_result(None)
    ray.settle(driver)
    assert told.of(HostGoneMessage) == []
    ray.actors[0].refs["watch"].done.set_result(1)
    ray.settle(driver)
    assert told.of(HostGoneMessage)[0].why.endswith("ended (1)")
    assert ray.killed == [ray.actors[0]]


def test_a_node_without_the_package_is_told(ray, make):
    driver, told = make()
    ray.actors[1].refs["report"].done.set_exception(ImportError("No module named 'pollux'"))
    ray.settle(driver)
    why = "No module named 'pollux'; install the same version of pollux-scheduler on every node"
    assert told.of(HostGoneMessage) == [HostGoneMessage("host-bbbbbb", f"node 'host-bbbbbb' cannot be used: {why}")]
    assert ray.killed == [ray.actors[1]], "the next try would find an actor that has failed for good"


def test_a_node_whose_actor_never_gets_up_is_told_and_tried_again(ray, make):
    driver, told = make()
    ray.report(ray.actors[1])
    ray.settle(driver)
    ray.now += 151.0
    driver.find_nodes()
    assert ray.killed == [ray.actors[0]]
    (gone,) = told.of(HostGoneMessage)
    assert gone.node == "host-aaaaaa"
    assert "not up after 150 s" in gone.why
    ray.now += 16.0
    driver.find_nodes()
    assert len(ray.actors) == 3
    driver.find_nodes()
    assert len(told.of(HostGoneMessage)) == 1


def test_a_host_of_another_secret_is_ended(ray, make):
    driver, told = make()
    ray.report(ray.actors[0], "cd" * 16)
    ray.settle(driver)
    assert ray.killed == [ray.actors[0]]
    assert told.of(HostMessage) == []


@pytest.mark.parametrize("other", [{"places": 2}, {"with_gpus": False}, {"warm": False}])
def test_an_idle_host_of_other_options_is_ended_and_started_anew(ray, make, other):
    driver, told = make()
    ray.report(ray.actors[0], **other)
    ray.settle(driver)
    assert ray.killed == [ray.actors[0]]
    assert told.of(HostMessage) == []
    assert "other options" in told.of(HostGoneMessage)[0].why
    ray.now += 16.0
    driver.find_nodes()
    assert ray.actors[2].named["places"] == 4
    ray.report(ray.actors[2])
    ray.settle(driver)
    assert told.of(HostMessage)[0].odd == ""


def test_a_host_of_another_version_is_refused(ray, make):
    driver, told = make()
    said = {"address": "10.0.0.1", "port": 7, "gpus": [], "secret": secret_digest("ab" * 16)}
    ray.actors[0].refs["report"].done.set_result(said)
    ray.settle(driver)
    (gone,) = told.of(HostGoneMessage)
    assert gone.why == (
        "node 'host-aaaaaa' has a host of another version of pollux-scheduler: install the same version of "
        "pollux-scheduler on every node"
    )
    assert (ray.killed, told.of(HostMessage)) == ([ray.actors[0]], [])


def test_a_host_of_other_options_that_works_stays_until_it_is_idle(ray, make):
    driver, told = make()
    ray.report(ray.actors[0], works=True, places=2)
    ray.settle(driver)
    assert ray.killed == []
    (said,) = told.of(HostMessage)
    assert "other options" in said.odd
    assert "places=2" in said.odd
    ray.ask_anew(ray.actors[0])
    driver.find_nodes()
    ray.settle(driver)
    assert not ray.actors[0].refs["report"].done.done(), "not asked again at once"
    for works, killed in ((True, []), (False, [ray.actors[0]])):
        ray.ask_anew(ray.actors[0])
        ray.report(ray.actors[0], works=works, places=2)
        ray.now += 2.1
        driver.find_nodes()
        ray.settle(driver)
        assert ray.killed == killed
    ray.actors[0].refs["watch"].done.set_exception(RuntimeError("killed"))
    ray.settle(driver)
    assert len(told.of(HostGoneMessage)) == 1
    assert len(told.of(HostMessage)) == 1


def test_slots_are_part_of_what_is_compared(ray, make):
    driver, told = make(slots=2)
    ray.report(ray.actors[0], with_gpus=False, places=2)
    ray.report(ray.actors[1])
    ray.settle(driver)
    assert ray.killed == [ray.actors[1]]
    assert len(told.of(HostMessage)) == 1
