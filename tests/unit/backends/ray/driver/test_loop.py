"""Looking at the cluster, and the end of the input."""

import re
import subprocess
import sys

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS


def test_nothing_new_is_told_as_well(ray, make):
    driver, told = make()
    driver.find_nodes()
    assert len(told.of("nodes")) == 1
    assert told.of("well") == [{}]
    assert len(ray.actors) == 2


def test_nodes_that_come_and_go_are_told(ray, make):
    driver, told = make()
    ray.rows = [ray.row("b"), ray.row("c")]
    driver.find_nodes()
    assert [node["name"] for node in told.of("nodes")[1]["nodes"]] == ["host-bbbbbb", "host-cccccc"]
    assert ray.actors[-1].given[0] == "host-cccccc"
    ray.report(ray.actors[0])
    ray.settle(driver)
    assert told.of("host") == []


@pytest.mark.parametrize(("slots", "tables"), [(None, 0), (8, 1)])
def test_a_look_costs_ray_the_same_however_much_there_is(ray, make, slots, tables):
    ray.rows = [{**ray.row("a"), "NodeID": f"{number:06x}" * 9} for number in range(300)]
    driver, told = make(slots=slots)
    nodes = [node["name"] for node in told.of("nodes")[0]["nodes"]]
    driver.obey({"do": "take", "claims": {f"pollux:s:j:{number}": name for number, name in enumerate(nodes)}})
    # Two thirds are granted, and the others wait and have been said to.
    for number, group in enumerate([*ray.groups.values()]):
        if number % 3:
            group.state = "CREATED"
            if slots is None:
                ray.probes[number][1].done.set_result(["0"])
    ray.settle(driver)
    ray.now += 6.0
    driver.look_around()
    assert (len(told.of("granted")), len(told.of("waits"))) == (200, 100)
    actors, probes = len(ray.actors), len(ray.probes)
    ray.looks = ray.tables = 0
    driver.look_around()
    assert (ray.looks, ray.tables) == (1, tables)
    assert (len(ray.actors), len(ray.probes)) == (actors, probes)


ENDING = """
import os, sys, time
sys.stdin = open(sys.argv[1])
from pollux.backends.ray.driver.__main__ import listen
class Slow:
    import queue
    events = queue.SimpleQueue()
    def obey(self, order):
        time.sleep(0.2)
        print(order["do"], flush=True)
driver = Slow()
import threading
threading.Thread(target=listen, args=(driver,), daemon=True).start()
while True:
    handle, given = driver.events.get()
    handle(*given)
"""


def test_what_was_ordered_is_done_before_the_end(tmp_path):
    orders = tmp_path / "orders"
    orders.write_text('{"do": "free"}\n{"do": "release"}\n')
    words = [sys.executable, "-c", ENDING, str(orders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout.split() == ["free", "release"]


def test_nodes_that_ray_drains_are_told_with_when_it_ends_them(ray, make):
    driver, told = make()
    assert told.of("nodes")[-1]["leaving"] == {}
    ray.draining = {"a" * 56: 0, "c" * 56: 0}
    driver.find_nodes()
    assert told.of("nodes")[-1]["leaving"] == {"host-aaaaaa": "Ray drains it"}
    assert len(told.of("nodes")[-1]["nodes"]) == 2, "it is there as long as Ray has it"
    ray.draining = {"b" * 56: 1_700_000_000_000}
    driver.find_nodes()
    (why,) = told.of("nodes")[-1]["leaving"].values()
    assert re.fullmatch(r"Ray drains it, and ends it at \d\d:\d\d:\d\d", why)
    before = len(told.of("nodes"))
    driver.find_nodes()
    assert len(told.of("nodes")) == before, "nothing new"


def test_a_ray_that_does_not_tell_what_it_drains_is_used_all_the_same(ray, make):
    del ray._private
    _, told = make()
    assert told.of("nodes")[-1]["leaving"] == {}
