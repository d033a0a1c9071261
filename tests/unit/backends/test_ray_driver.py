"""The driver against a Ray that is played: what it asks of Ray, and what it tells."""

import subprocess
import sys
import types
from concurrent.futures import Future
from typing import Any

import pytest

from pollux.backends._ray_driver import Driver, _plain
from pollux.backends._ray_host import NodeHost, found_gpus, secret_digest

SECRET = "ab" * 16


class Ref:
    def __init__(self):
        self.done: Future[Any] = Future()

    def future(self):
        return self.done


class Actor:
    def __init__(self, options, given):
        self.options, self.given = options, given
        self.refs = {"report": Ref(), "watch": Ref(), "part": Ref()}

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=lambda: self.refs[name])


class Remote:
    def __init__(self, ray, what, options=None):
        self.ray, self.what, self.given = ray, what, options or {}

    def options(self, **options):
        return Remote(self.ray, self.what, options)

    def remote(self, *given):
        if self.what is NodeHost:
            self.ray.actors.append(Actor(self.given, given))
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
        self.util = types.SimpleNamespace(
            placement_group_table=self.table,
            get_placement_group=lambda name: self.groups[name],
            remove_placement_group=lambda group: self.groups.pop(group.name),
        )

    def nodes(self):
        return self.rows

    def remote(self, what):
        return Remote(self, what)

    def wait(self, refs, num_returns, timeout):
        assert num_returns == len(refs)
        self.awaited += refs

    def kill(self, actor):
        self.killed.append(actor)

    def table(self, group=None):
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


def report(actor, secret=SECRET):
    actor.refs["report"].done.set_result(
        {"address": "10.0.0.1", "port": 7, "gpus": [0, 1, 2, 3], "boot": "x", "secret": secret_digest(secret)}
    )


def test_every_node_gets_an_actor_of_its_own(ray, make):
    driver, told = make()
    assert [actor.options["scheduling_strategy"] for actor in ray.actors] == [("a" * 56, False), ("b" * 56, False)]
    assert all(actor.options["lifetime"] == "detached" for actor in ray.actors)
    assert all(actor.options["num_cpus"] == 0 and actor.options["get_if_exists"] for actor in ray.actors)
    assert [node["name"] for node in told.of("nodes")[0]["nodes"]] == ["host-aaaaaa", "host-bbbbbb"]
    report(ray.actors[0])
    settle(driver)
    assert told.of("host") == [{"node": "host-aaaaaa", "address": ["10.0.0.1", 7], "gpus": [0, 1, 2, 3], "boot": "x"}]


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
    assert told.of("gone") == [
        {"node": "host-bbbbbb", "why": "node 'host-bbbbbb' cannot be used: No module named 'pollux'"}
    ]
    assert ray.killed == [ray.actors[1]], "the next try would find an actor that has failed for good"


def test_a_host_of_another_secret_is_ended(ray, make):
    driver, told = make()
    report(ray.actors[0], "cd" * 16)
    settle(driver)
    assert ray.killed == [ray.actors[0]]
    assert told.of("host") == []


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


def test_long_errors_are_told_by_their_last_line():
    assert _plain(RuntimeError("Traceback\n  somewhere\nValueError: no\n\n")) == "ValueError: no"
    assert _plain(RuntimeError()) == "RuntimeError"
    assert _plain(RuntimeError("Traceback\npollux.core.errors.BackendFailed: it is away")) == "it is away"


ENDING = """
import os, sys, time
sys.stdin = open(sys.argv[1])
from pollux.backends import _ray_driver
class Slow:
    import queue
    events = queue.SimpleQueue()
    def obey(self, order):
        time.sleep(0.2)
        print(order["do"], flush=True)
driver = Slow()
import threading
threading.Thread(target=_ray_driver._listen, args=(driver,), daemon=True).start()
while True:
    handle, given = driver.events.get()
    handle(*given)
"""


def test_what_was_ordered_is_done_before_the_end(tmp_path):
    orders = tmp_path / "orders"
    orders.write_text('{"do": "free"}\n{"do": "part"}\n')
    words = [sys.executable, "-c", ENDING, str(orders)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["free", "part"]
