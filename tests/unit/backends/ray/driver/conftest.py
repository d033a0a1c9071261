"""A Ray that is played: what the driver asks of it is kept, and what it answers is up to the test."""

import inspect
import sys
import types
from concurrent.futures import Future
from typing import Any

import pytest

from pollux.backends.ray.driver.loop import Driver
from pollux.backends.ray.driver_messages import DesireNodes, DriverOrder, decode_message, encode_line
from pollux.backends.ray.node_actor import NodeHost, found_gpus, secret_digest

SECRET = "ab" * 16
OPTIONS = {"places": 4, "with_gpus": True, "warm": True}


class Ref:
    def __init__(self):
        self.done: Future[Any] = Future()

    def future(self):
        return self.done


class Actor:
    def __init__(self, options, given, named):
        self.options, self.given, self.named = options, given, named
        self.refs = {"report": Ref(), "watch": Ref(), "release": Ref()}

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
    """As much of Ray as the driver uses, and what tests do with it. `now` is the driver's clock."""

    def __init__(self):
        self.now = 1000.0
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

    def row(self, letter, gpus=4):
        return {
            "NodeID": letter * 56,
            "Alive": True,
            "NodeManagerAddress": "10.0.0.1",
            "NodeManagerHostname": "host",
            "Resources": {"GPU": gpus, "CPU": 8},
        }

    def put_group(self, name):
        self.groups[name] = Group(name, "a" * 56)

    def ask_anew(self, actor):
        """The next question for a report has an answer of its own."""
        actor.refs["report"] = Ref()

    def watch_anew(self, actor):
        actor.refs["watch"] = Ref()

    def report(self, actor, secret=SECRET, works=False, **options):
        said = {"address": "10.0.0.1", "port": 7, "gpus": [0, 1, 2, 3], "secret": secret_digest(secret), "doubt": ""}
        actor.refs["report"].done.set_result({**said, "options": {**OPTIONS, **options}, "works": works})

    def settle(self, driver):
        while not driver.events.empty():
            handle, given = driver.events.get()
            handle(*given)


@pytest.fixture
def ray(monkeypatch):
    played = PlayedRay()
    played.rows = [played.row("a"), played.row("b")]
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
    """What the driver has told, as the service reads it."""

    def __call__(self, message):
        self.append(decode_message(encode_line(message)))

    def of(self, kind):
        return [message for message in self if isinstance(message, kind)]


@pytest.fixture
def make(ray):
    def made(claims=None, slots=None, with_gpus=True, desired=None):
        order = DriverOrder(
            SECRET, "pollux:s:", slots=slots, with_gpus=with_gpus, claims=claims or {}, desired=DesireNodes(desired)
        )
        told = Told()
        driver = Driver(ray, order, told, lambda: ray.now)
        driver.recover()
        return driver, told

    return made
