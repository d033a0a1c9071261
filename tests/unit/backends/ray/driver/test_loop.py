"""Looking at the cluster, and the end of the input."""

import re
import subprocess
import sys

import pytest

from pollux.backends.ray.driver_messages import (
    FreeClaims,
    GrantedMessage,
    HostMessage,
    NodesMessage,
    ReleaseHosts,
    TakeClaims,
    WaitsMessage,
    WellMessage,
    encode_line,
)
from pollux.testing.waiting import PATIENCE_SECONDS


def test_nothing_new_is_told_as_well(ray, make):
    driver, told = make()
    driver.find_nodes()
    assert len(told.of(NodesMessage)) == 1
    assert told.of(WellMessage) == [WellMessage()]
    assert len(ray.actors) == 2


def test_nodes_that_come_and_go_are_told(ray, make):
    driver, told = make()
    ray.rows = [ray.row("b"), ray.row("c")]
    driver.find_nodes()
    assert [node.name for node in told.of(NodesMessage)[1].nodes] == ["host-bbbbbb", "host-cccccc"]
    assert ray.actors[-1].given[0] == "host-cccccc"
    ray.report(ray.actors[0])
    ray.settle(driver)
    assert told.of(HostMessage) == []


@pytest.mark.parametrize(("slots", "tables"), [(None, 0), (8, 1)])
def test_a_look_costs_ray_the_same_however_much_there_is(ray, make, slots, tables):
    ray.rows = [{**ray.row("a"), "NodeID": f"{number:06x}" * 9} for number in range(300)]
    driver, told = make(slots=slots)
    nodes = [node.name for node in told.of(NodesMessage)[0].nodes]
    driver.obey(TakeClaims({f"pollux:s:j:{number}": name for number, name in enumerate(nodes)}))
    # Two thirds are granted, and the others wait and have been said to.
    for number, group in enumerate([*ray.groups.values()]):
        if number % 3:
            group.state = "CREATED"
            if slots is None:
                ray.probes[number][1].done.set_result(["0"])
    ray.settle(driver)
    ray.now += 6.0
    driver.look_around()
    assert (len(told.of(GrantedMessage)), len(told.of(WaitsMessage))) == (200, 100)
    actors, probes = len(ray.actors), len(ray.probes)
    ray.looks = ray.tables = 0
    driver.look_around()
    assert (ray.looks, ray.tables) == (1, tables)
    assert (len(ray.actors), len(ray.probes)) == (actors, probes)


ENDING = """
import os, sys, time
from pollux.backends.ray.driver.__main__ import listen, requests_of
class Slow:
    import queue
    events = queue.SimpleQueue()
    def obey(self, order):
        time.sleep(0.2)
        print(type(order).__name__, flush=True)
driver = Slow()
import threading
threading.Thread(target=listen, args=(driver, requests_of(0)), daemon=True).start()
while True:
    handle, given = driver.events.get()
    handle(*given)
"""


def test_what_was_ordered_is_done_before_the_end(tmp_path):
    orders = tmp_path / "orders"
    orders.write_bytes(encode_line(FreeClaims(("a",))) + encode_line(ReleaseHosts()))
    words = [sys.executable, "-c", ENDING]
    with orders.open() as lines:
        done = subprocess.run(words, stdin=lines, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout.split() == ["FreeClaims", "ReleaseHosts"]


def test_a_request_that_cannot_be_read_ends_the_driver_with_the_reason():
    """The service starts another one, with everything that it must know in its first line."""
    words = [sys.executable, "-c", ENDING]
    lines = encode_line(FreeClaims(("a",))) + b'["FreeClaims", {"names": 3}]\n' + encode_line(ReleaseHosts())
    done = subprocess.run(words, input=lines, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stdout.split()) == (1, [b"FreeClaims"])
    assert done.stderr == b"a request of the service is refused: FreeClaims: names is 3: give a list\n"


def test_nodes_that_ray_drains_are_told_with_when_it_ends_them(ray, make):
    driver, told = make()
    assert told.of(NodesMessage)[-1].leaving == {}
    ray.draining = {"a" * 56: 0, "c" * 56: 0}
    driver.find_nodes()
    assert told.of(NodesMessage)[-1].leaving == {"host-aaaaaa": "Ray drains it"}
    assert len(told.of(NodesMessage)[-1].nodes) == 2, "it is there as long as Ray has it"
    ray.draining = {"b" * 56: 1_700_000_000_000}
    driver.find_nodes()
    (why,) = told.of(NodesMessage)[-1].leaving.values()
    assert re.fullmatch(r"Ray drains it, and ends it at \d\d:\d\d:\d\d", why)
    before = len(told.of(NodesMessage))
    driver.find_nodes()
    assert len(told.of(NodesMessage)) == before, "nothing new"


def test_a_ray_that_does_not_tell_what_it_drains_is_used_all_the_same(ray, make):
    del ray._private
    _, told = make()
    assert told.of(NodesMessage)[-1].leaving == {}
