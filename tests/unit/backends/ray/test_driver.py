"""The driver against a Ray that is played: what it asks of Ray, and what it tells."""

import inspect
import re
import subprocess
import sys
import types
from concurrent.futures import Future
from typing import Any

import pytest

from pollux.backends.ray import driver as driver_module
from pollux.backends.ray.driver import Driver
from pollux.backends.ray.node_actor import NodeHost, found_gpus, secret_digest
from pollux.testing.waiting import PATIENCE_SECONDS

SECRET = "ab" * 16


class Ref:
    def __init__(self):
        self.done: Future[Any] = Future()

    def future(self):
        return self.done


class Actor:
    def __init__(self, options, given, named):
        self.options, self.given, self.named = options, given, named
        self.refs = {"report": Ref(), "watch": Ref(), "part": Ref()}

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda: self.refs[name])


class Remote:
    def __init__(self, ray, what, options=None):
        self.ray, self.what, self.given = ray, what, options or {}

    def options(self, **options):
        return Remote(self.ray, self.what, options)

    def remote(self, *given, **named):
        if self.what is NodeHost:
            inspect.signature(NodeHost).bind(*given, **named)
            self.ray.actors.append(Actor(self.given, given, named))
            return self.ray.actors[-1]
        assert self.what is found_gpus
        self.ray.probes.append((self.given, Ref()))
        return self.ray.probes[-1][1]


class Group:
    def __init__(self, name, selector):
        self.name, self.selector, self.state = name, selector, "PENDING"


class PlayedRay:
    """As much of Ray as the driver uses."""

    def __init__(self):
        self.rows, self.actors, self.probes, self.killed, self.wishes, self.awaited = [], [], [], [], [], []
        self.groups: dict[str, Group] = {}
        self.tables = self.looks = 0
        self.draining: dict[str, int] = {}
        state = types.SimpleNamespace(get_draining_nodes=lambda: self.draining)
        self._private = types.SimpleNamespace(state=types.SimpleNamespace(state=state))
        self.util = types.SimpleNamespace(
            placement_group_table=self.table,
            get_placement_group=lambda name: self.groups[name],
            remove_placement_group=lambda group: self.groups.pop(group.name),
        )

    def nodes(self):
        self.looks += 1
        return self.rows

    def remote(self, what):
        return Remote(self, what)

    def wait(self, refs, num_returns, timeout):
        assert num_returns == len(refs)
        self.awaited += refs

    def kill(self, actor):
        self.killed.append(actor)

    def table(self, group=None):
        self.tables += 1
        if group is not None:
            return {"state": group.state}
        return {name: {"name": name, "state": each.state} for name, each in self.groups.items()}

    def placement_group(self, bundles, name, lifetime, bundle_label_selector):
        assert lifetime == "detached"
        self.groups[name] = Group(name, bundle_label_selector[0]["ray.io/node-id"])
        self.groups[name].bundles = bundles
        return self.groups[name]


def row(letter, gpus=4):
    return {
        "NodeID": letter * 56,
        "Alive": True,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "host",
        "Resources": {"GPU": gpus, "CPU": 8},
    }


@pytest.fixture
def ray(monkeypatch):
    played = PlayedRay()
    played.rows = [row("a"), row("b")]
    named = {
        "ray.util.scheduling_strategies": types.SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node_id, soft: (node_id, soft),
            PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: group,
        ),
        "ray.util.placement_group": types.SimpleNamespace(placement_group=played.placement_group),
        "ray.autoscaler.sdk": types.SimpleNamespace(
            request_resources=lambda bundles: played.wishes.append(bundles),
        ),
    }
    for name, module in named.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("ray", "ray.util", "ray.autoscaler"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return played


class Told(list[Any]):
    def __call__(self, kind, **more):
        self.append((kind, more))

    def of(self, kind):
        return [more for each, more in self if each == kind]


@pytest.fixture
def make(ray):
    def made(claims=None, slots=None, with_gpus=True, desired=None):
        order = {"secret": SECRET, "slots": slots, "with_gpus": with_gpus, "warm": True, "prefix": "pollux:s:"}
        told = Told()
        driver = Driver(ray, {**order, "claims": claims or {}, "desired": desired}, told)
        driver._look()
        driver._recover()
        return driver, told

    return made


def settle(driver):
    while not driver.events.empty():
        handle, given = driver.events.get()
        handle(*given)


OPTIONS = {"places": 4, "with_gpus": True, "warm": True}


def report(actor, secret=SECRET, works=False, **options):
    said = {"address": "10.0.0.1", "port": 7, "gpus": [0, 1, 2, 3], "boot": "x", "secret": secret_digest(secret)}
    actor.refs["report"].done.set_result({**said, "options": {**OPTIONS, **options}, "works": works})


def test_every_node_gets_an_actor_of_its_own(ray, make):
    driver, told = make()
    assert [actor.options["scheduling_strategy"] for actor in ray.actors] == [("a" * 56, False), ("b" * 56, False)]
    assert all(actor.options["lifetime"] == "detached" for actor in ray.actors)
    assert all(actor.options["num_cpus"] == 0 and actor.options["get_if_exists"] for actor in ray.actors)
    assert [node["name"] for node in told.of("nodes")[0]["nodes"]] == ["host-aaaaaa", "host-bbbbbb"]
    report(ray.actors[0])
    settle(driver)
    assert told.of("host") == [
        {"node": "host-aaaaaa", "address": ["10.0.0.1", 7], "gpus": [0, 1, 2, 3], "boot": "x", "odd": "", "doubt": ""}
    ]


def test_nothing_new_is_told_as_well(ray, make):
    driver, told = make()
    driver._look()
    assert len(told.of("nodes")) == 1
    assert told.of("well") == [{}]
    assert len(ray.actors) == 2


def test_nodes_that_come_and_go_are_told(ray, make):
    driver, told = make()
    ray.rows = [row("b"), row("c")]
    driver._look()
    assert [node["name"] for node in told.of("nodes")[1]["nodes"]] == ["host-bbbbbb", "host-cccccc"]
    assert ray.actors[-1].given[0] == "host-cccccc"
    report(ray.actors[0])
    settle(driver)
    assert told.of("host") == []


def test_a_host_that_ends_is_told_and_started_again(ray, make):
    driver, told = make()
    report(ray.actors[0])
    settle(driver)
    ray.actors[0].refs["watch"].done.set_exception(RuntimeError("long story\nthe actor died"))
    settle(driver)
    assert told.of("gone") == [{"node": "host-aaaaaa", "why": "the host of node 'host-aaaaaa' ended (the actor died)"}]
    driver._seats["a" * 56].again_at = 0.0
    driver._look()
    assert len(ray.actors) == 3


def test_a_question_that_was_asked_long_enough_is_asked_again(ray, make):
    driver, told = make()
    report(ray.actors[0])
    settle(driver)
    first = ray.actors[0].refs["watch"]
    ray.actors[0].refs["watch"] = Ref()
    first.done.set_result(None)
    settle(driver)
    assert told.of("gone") == []
    ray.actors[0].refs["watch"].done.set_result(1)
    settle(driver)
    assert told.of("gone")[0]["why"].endswith("ended (1)")
    assert ray.killed == [ray.actors[0]]


def test_a_node_without_the_package_is_told(ray, make):
    driver, told = make()
    ray.actors[1].refs["report"].done.set_exception(ImportError("No module named 'pollux'"))
    settle(driver)
    why = "No module named 'pollux'; install the same version of pollux-scheduler on every node"
    assert told.of("gone") == [{"node": "host-bbbbbb", "why": f"node 'host-bbbbbb' cannot be used: {why}"}]
    assert ray.killed == [ray.actors[1]], "the next try would find an actor that has failed for good"


def test_a_node_whose_actor_never_gets_up_is_told_and_tried_again(ray, make):
    driver, told = make()
    report(ray.actors[1])
    settle(driver)
    for seat in driver._seats.values():
        if seat.asked_at is not None:
            seat.asked_at -= 3600
    driver._look()
    assert ray.killed == [ray.actors[0]]
    (gone,) = told.of("gone")
    assert gone["node"] == "host-aaaaaa"
    assert "not up after 150 s" in gone["why"]
    driver._seats["a" * 56].again_at = 0.0
    driver._look()
    assert len(ray.actors) == 3
    driver._look()
    assert len(told.of("gone")) == 1


def test_a_host_of_another_secret_is_ended(ray, make):
    driver, told = make()
    report(ray.actors[0], "cd" * 16)
    settle(driver)
    assert ray.killed == [ray.actors[0]]
    assert told.of("host") == []


@pytest.mark.parametrize("other", [{"places": 2}, {"with_gpus": False}, {"warm": False}])
def test_an_idle_host_of_other_options_is_ended_and_started_anew(ray, make, other):
    driver, told = make()
    report(ray.actors[0], **other)
    settle(driver)
    assert ray.killed == [ray.actors[0]]
    assert told.of("host") == []
    assert "other options" in told.of("gone")[0]["why"]
    driver._seats["a" * 56].again_at = 0.0
    driver._look()
    assert ray.actors[2].named["places"] == 4
    report(ray.actors[2])
    settle(driver)
    assert told.of("host")[0]["odd"] == ""


def test_a_host_of_a_version_that_did_not_say_its_options_is_taken_as_it_is(ray, make):
    driver, told = make()
    said = {"address": "10.0.0.1", "port": 7, "gpus": [], "boot": "x", "secret": secret_digest(SECRET)}
    ray.actors[0].refs["report"].done.set_result(said)
    settle(driver)
    assert (ray.killed, told.of("host")[0]["odd"]) == ([], "")


def test_a_host_of_other_options_that_works_stays_until_it_is_idle(ray, make):
    driver, told = make()
    report(ray.actors[0], works=True, places=2)
    settle(driver)
    assert ray.killed == []
    (said,) = told.of("host")
    assert "other options" in said["odd"]
    assert "places=2" in said["odd"]
    ray.actors[0].refs["report"] = Ref()
    driver._look()
    settle(driver)
    assert not ray.actors[0].refs["report"].done.done(), "not asked again at once"
    for works, killed in ((True, []), (False, [ray.actors[0]])):
        ray.actors[0].refs["report"] = Ref()
        report(ray.actors[0], works=works, places=2)
        driver._odd["a" * 56] = 0.0
        driver._look()
        settle(driver)
        assert ray.killed == killed
    ray.actors[0].refs["watch"].done.set_exception(RuntimeError("killed"))
    settle(driver)
    assert len(told.of("gone")) == 1
    assert driver._odd == {}
    assert len(told.of("host")) == 1


def test_slots_are_part_of_what_is_compared(ray, make):
    driver, told = make(slots=2)
    report(ray.actors[0], with_gpus=False, places=2)
    report(ray.actors[1])
    settle(driver)
    assert ray.killed == [ray.actors[1]]
    assert len(told.of("host")) == 1


def test_a_claim_is_a_group_on_its_node_and_is_granted_with_its_gpu(ray, make):
    driver, told = make()
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-bbbbbb"}})
    group = ray.groups["pollux:s:j:1"]
    assert (group.selector, group.bundles) == ("b" * 56, [{"GPU": 1}])
    (options, ref) = ray.probes[0]
    assert (options["num_gpus"], options["num_cpus"], options["scheduling_strategy"]) == (1, 0, group)
    ref.done.set_result(["2"])
    settle(driver)
    assert told.of("granted") == [{"claim": "pollux:s:j:1", "gpu": "2"}]
    driver.obey({"do": "free", "names": ["pollux:s:j:1", "unknown"]})
    assert ray.groups == {}


def test_cpu_slots_need_no_process_to_be_found(ray, make):
    driver, told = make(slots=2)
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-aaaaaa"}})
    assert (ray.probes, ray.groups["pollux:s:j:1"].bundles) == ([], [{"CPU": 1}])
    driver._see_groups(driver._pending())
    assert told.of("granted") == []
    ray.groups["pollux:s:j:1"].state = "CREATED"
    driver._see_groups(driver._pending())
    assert told.of("granted") == [{"claim": "pollux:s:j:1", "gpu": None}]
    assert driver._pending() == []


@pytest.mark.parametrize(("count", "calls"), [(3, 3), (50, 1)])
def test_many_claims_are_asked_after_at_once(ray, make, count, calls):
    driver, told = make(slots=64)
    driver.obey({"do": "take", "claims": {f"pollux:s:j:{number}": "host-aaaaaa" for number in range(count)}})
    ray.tables = 0
    driver._see_groups(driver._pending())
    assert (ray.tables, told.of("granted")) == (calls, [])
    ray.groups["pollux:s:j:1"].state = "CREATED"
    driver._see_groups(driver._pending())
    assert told.of("granted") == [{"claim": "pollux:s:j:1", "gpu": None}]
    ray.tables = 0
    driver._see_groups([])
    assert ray.tables == 0


@pytest.mark.parametrize(("slots", "tables"), [(None, 0), (8, 1)])
def test_a_look_costs_ray_the_same_however_much_there_is(ray, make, slots, tables):
    ray.rows = [{**row("a"), "NodeID": f"{number:06x}" * 9} for number in range(300)]
    driver, told = make(slots=slots)
    nodes = [node["name"] for node in told.of("nodes")[0]["nodes"]]
    driver.obey({"do": "take", "claims": {f"pollux:s:j:{number}": name for number, name in enumerate(nodes)}})
    # Two thirds are granted, and the others wait and have been said to.
    for number, group in enumerate([*ray.groups.values()]):
        if number % 3:
            group.state = "CREATED"
            if slots is None:
                ray.probes[number][1].done.set_result(["0"])
    settle(driver)
    for known in driver._groups.values():
        if known.waits_since is not None:
            known.waits_since -= 3600
    driver.look_around()
    assert (len(told.of("granted")), len(told.of("waits"))) == (200, 100)
    actors, probes = len(ray.actors), len(ray.probes)
    ray.looks = ray.tables = 0
    driver.look_around()
    assert (ray.looks, ray.tables) == (1, tables)
    assert (len(ray.actors), len(ray.probes)) == (actors, probes)


@pytest.mark.parametrize("with_gpus", [True, False])
def test_a_claim_that_is_not_met_in_time_is_told_once(ray, make, with_gpus):
    driver, told = make(with_gpus=with_gpus)
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-aaaaaa"}})
    driver._see_groups(driver._pending())
    assert told.of("waits") == []
    driver._groups["pollux:s:j:1"].waits_since -= 3600
    driver._see_groups(driver._pending())
    driver._see_groups(driver._pending())
    assert told.of("waits") == [{"claim": "pollux:s:j:1"}]
    driver.obey({"do": "wait anew", "names": ["pollux:s:j:1", "unknown"]})
    driver._groups["pollux:s:j:1"].waits_since -= 3600
    driver._see_groups(driver._pending())
    assert len(told.of("waits")) == 2


def test_a_group_that_is_there_is_not_late_however_slow_its_answer(ray, make):
    driver, told = make()
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-aaaaaa"}})
    ray.groups["pollux:s:j:1"].state = "CREATED"
    driver._groups["pollux:s:j:1"].waits_since -= 3600
    driver._see_groups(driver._pending())
    assert told.of("waits") == []


def test_groups_of_before_are_kept_made_or_removed(ray, make):
    for name in ("pollux:s:kept", "pollux:s:orphan", "pollux:other:x", "foreign"):
        ray.groups[name] = Group(name, "a" * 56)
    make(claims={"pollux:s:kept": "host-aaaaaa", "pollux:s:lost": "host-bbbbbb"})
    assert sorted(ray.groups) == ["foreign", "pollux:other:x", "pollux:s:kept", "pollux:s:lost"]
    assert len(ray.probes) == 2


def test_a_claim_on_a_node_that_is_gone_makes_no_group(ray, make):
    driver, _ = make()
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-zzzzzz"}})
    assert ray.groups == {}


def test_a_group_that_fails_is_told_and_given_back(ray, make):
    driver, told = make()
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-aaaaaa"}})
    ray.probes[0][1].done.set_exception(RuntimeError("removed"))
    settle(driver)
    assert told.of("failed") == [{"claim": "pollux:s:j:1", "why": "removed"}]
    assert ray.groups == {}
    driver._take_again()
    assert ray.groups == {}, "asked again at once"


def test_a_group_that_fails_is_made_again_after_a_while_unless_it_was_given_back(ray, make):
    driver, _ = make()
    driver.obey({"do": "take", "claims": {"pollux:s:j:1": "host-aaaaaa", "pollux:s:j:2": "host-aaaaaa"}})
    for _, ref in [*ray.probes]:
        ref.done.set_exception(RuntimeError("removed"))
    settle(driver)
    driver.obey({"do": "free", "names": ["pollux:s:j:2"]})
    driver._failed_at["pollux:s:j:1"] -= 3600
    driver._take_again()
    assert sorted(ray.groups) == ["pollux:s:j:1"]


def test_a_claim_finds_a_node_that_came_late(ray, make):
    driver, _ = make(claims={"pollux:s:j:1": "host-cccccc"})
    assert ray.groups == {}
    ray.rows.append(row("c"))
    driver._look()
    driver._take_again()
    assert ray.groups["pollux:s:j:1"].selector == "c" * 56


def spare(ray, driver, monkeypatch):
    """All hosts are up, and those of nodes that are not needed are asked whether they work."""
    monkeypatch.setattr(driver_module, "_SPARE_SECONDS", 0.0)
    for actor in ray.actors:
        report(actor)
    settle(driver)
    for actor in ray.actors:
        actor.refs["report"] = Ref()
    driver._look()


def test_hosts_beyond_the_wish_are_ended_so_that_ray_may_end_their_nodes(ray, make, monkeypatch):
    driver, told = make(claims={"pollux:s:job:0": "host-bbbbbb"}, desired=1)
    spare(ray, driver, monkeypatch)
    report(ray.actors[0])
    settle(driver)
    assert ray.killed == [ray.actors[0]]
    driver._look()
    assert [node["name"] for node in told.of("nodes")[-1]["nodes"]] == ["host-bbbbbb"], "the one with a claim stays"
    driver.obey({"do": "desire", "nodes": 2})
    driver._look()
    assert [node["name"] for node in told.of("nodes")[-1]["nodes"]] == ["host-aaaaaa", "host-bbbbbb"]
    assert ray.actors[-1].given[0] == "host-aaaaaa", "who is needed again gets another host"


def test_while_a_job_waits_every_node_is_needed(ray, make, monkeypatch):
    driver, told = make(desired=0)
    spare(ray, driver, monkeypatch)
    for actor in ray.actors[:2]:
        report(actor)
    settle(driver)
    assert told.of("nodes")[-1]["nodes"] == []
    # Which of them suits it, and which is broken, is not known here.
    driver.obey({"do": "desire", "nodes": 1, "awaited": True})
    driver._look()
    assert [node["name"] for node in told.of("nodes")[-1]["nodes"]] == ["host-aaaaaa", "host-bbbbbb"]


def test_of_nodes_that_nobody_uses_the_large_ones_that_are_up_stay(ray, make, monkeypatch):
    ray.rows = [row("a", 1), row("b"), row("c", 8)]
    driver, _ = make(desired=1)
    monkeypatch.setattr(driver_module, "_SPARE_SECONDS", 0.0)
    report(ray.actors[0], places=1)
    report(ray.actors[1])
    settle(driver)
    for actor in ray.actors[:2]:
        actor.refs["report"] = Ref()
    driver._look()
    report(ray.actors[0], places=1)
    settle(driver)
    assert ray.killed == [ray.actors[0]], "the host of the largest one is not up as yet"


def test_a_host_of_an_older_release_is_not_known_to_be_idle(ray, make, monkeypatch):
    driver, _ = make(desired=1)
    spare(ray, driver, monkeypatch)
    ray.actors[1].refs["report"].done.set_result({"address": "10.0.0.1", "port": 7})
    settle(driver)
    assert ray.killed == []


@pytest.mark.parametrize("why", ["it works", "a claim came", "it is wished for again", "nobody said what is wished"])
def test_a_host_that_is_needed_after_all_stays(ray, make, monkeypatch, why):
    driver, told = make(desired=None if why == "nobody said what is wished" else 1)
    spare(ray, driver, monkeypatch)
    if why == "a claim came":
        driver.obey({"do": "take", "claims": {"pollux:s:job:0": "host-bbbbbb"}})
    elif why == "it is wished for again":
        driver.obey({"do": "desire", "nodes": 2})
        driver._look()
    monkeypatch.setattr(driver_module, "_SPARE_SECONDS", 60.0)
    report(ray.actors[1], works=why == "it works")
    settle(driver)
    driver._look()
    assert ray.killed == []
    assert len(told.of("nodes")) == 1, "no node came or went"


def test_the_autoscaler_is_asked_for_whole_nodes(ray, make):
    driver, _ = make()
    driver.obey({"do": "desire", "nodes": 3})
    driver.obey({"do": "desire", "nodes": 0})
    assert ray.wishes == [[{"GPU": 4}] * 3, []]


def test_a_wish_of_before_is_repeated_and_made_anew_when_nodes_turn_out_larger(ray, make):
    ray.rows = []
    driver, _ = make(desired=2)
    assert ray.wishes == [[{"GPU": 1}] * 2]
    ray.rows = [row("a", 8)]
    driver._look()
    ray.rows = []
    driver._look()
    assert ray.wishes[1:] == [[{"GPU": 8}] * 2]


def test_at_the_end_of_all_hosts_are_told_and_the_wish_is_taken_back(ray, make):
    driver, _ = make(desired=2)
    driver.obey({"do": "part"})
    assert ray.wishes == [[{"GPU": 4}] * 2, []]
    assert ray.awaited == [actor.refs["part"] for actor in ray.actors]


def test_who_never_had_a_wish_takes_none_back(ray, make):
    driver, _ = make()
    driver.obey({"do": "part"})
    assert ray.wishes == []


ENDING = """
import os, sys, time
sys.stdin = open(sys.argv[1])
from pollux.backends.ray import driver as ray_driver
class Slow:
    import queue
    events = queue.SimpleQueue()
    def obey(self, order):
        time.sleep(0.2)
        print(order["do"], flush=True)
driver = Slow()
import threading
threading.Thread(target=ray_driver._listen, args=(driver,), daemon=True).start()
while True:
    handle, given = driver.events.get()
    handle(*given)
"""


def test_what_was_ordered_is_done_before_the_end(tmp_path):
    orders = tmp_path / "orders"
    orders.write_text('{"do": "free"}\n{"do": "part"}\n')
    words = [sys.executable, "-c", ENDING, str(orders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    assert done.stdout.split() == ["free", "part"]


def test_nodes_that_ray_drains_are_told_with_when_it_ends_them(ray, make):
    driver, told = make()
    assert told.of("nodes")[-1]["leaving"] == {}
    ray.draining = {"a" * 56: 0, "c" * 56: 0}
    driver._look()
    assert told.of("nodes")[-1]["leaving"] == {"host-aaaaaa": "Ray drains it"}
    assert len(told.of("nodes")[-1]["nodes"]) == 2, "it is there as long as Ray has it"
    ray.draining = {"b" * 56: 1_700_000_000_000}
    driver._look()
    (why,) = told.of("nodes")[-1]["leaving"].values()
    assert re.fullmatch(r"Ray drains it, and ends it at \d\d:\d\d:\d\d", why)
    before = len(told.of("nodes"))
    driver._look()
    assert len(told.of("nodes")) == before, "nothing new"


def test_a_ray_that_does_not_tell_what_it_drains_is_used_all_the_same(ray, make):
    del ray._private
    _, told = make()
    assert told.of("nodes")[-1]["leaving"] == {}
