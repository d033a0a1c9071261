"""The provider with the real process of its driver, which finds a small stand-in for Ray."""

import threading

import pytest

from pollux.backends.ray.options import RayOptions
from pollux.backends.ray.provider import RayNodeProvider
from pollux.testing.waiting import wait_until

RAY = """
import types
from concurrent.futures import Future

from pollux.backends.ray.node_actor import secret_digest
from ray import util

__version__ = "0"


def init(address, namespace, **options):
    print("Ray prints this between the lines")


def nodes():
    return [{
        "NodeID": "a" * 56, "Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "host",
        "Resources": {"CPU": 8},
    }]


def call(value=None, ends=True):
    future = Future()
    if ends:
        future.set_result(value)
    return types.SimpleNamespace(remote=lambda: types.SimpleNamespace(future=lambda: future))


def actor(name, listen, secret, prefix, **options):
    report = {"address": listen, "port": 7, "gpus": [], "doubt": "", "works": False}
    report |= {"secret": secret_digest(secret), "options": options}
    return types.SimpleNamespace(report=call(report), watch=call(ends=False), release=call())


def remote(what):
    return types.SimpleNamespace(options=lambda **given: types.SimpleNamespace(remote=actor))


def wait(refs, num_returns, timeout):
    util.note("released")
"""
UTIL = """
import os
from pathlib import Path

GROUPS = {}


def note(text):
    with (Path(os.environ["STAND_IN_NOTES"])).open("a") as file:
        file.write(text + "\\n")


def placement_group_table(group=None):
    if group is not None:
        return {"state": "CREATED"}
    return {name: {"name": name, "state": "CREATED"} for name in GROUPS}


def remove_placement_group(group):
    GROUPS.pop(group)
    note("removed " + group.rpartition(":")[0].partition(":")[2].partition(":")[2])
"""
GROUP = """
from ray import util


def placement_group(bundles, name, lifetime, bundle_label_selector):
    util.GROUPS[name] = bundles
    return name
"""
STRATEGIES = """
def NodeAffinitySchedulingStrategy(node_id, soft):
    return node_id
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    folder = tmp_path / "stand-in" / "ray"
    (folder / "util").mkdir(parents=True)
    (folder / "__init__.py").write_text(RAY)
    (folder / "util" / "__init__.py").write_text(UTIL)
    (folder / "util" / "placement_group.py").write_text(GROUP)
    (folder / "util" / "scheduling_strategies.py").write_text(STRATEGIES)
    notes = tmp_path / "notes"
    notes.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))
    monkeypatch.setenv("STAND_IN_NOTES", str(notes))
    return notes


def test_places_are_lent_granted_and_given_back(tmp_path, notes):
    changed = threading.Event()
    provider = RayNodeProvider(tmp_path / "home", RayOptions(slots=2))
    provider.start(b"s" * 16, "127.0.0.1", changed.set)
    try:
        (lent,) = wait_until("host", provider.hosts, story=provider.warnings)
        assert (lent.node.id, lent.node.num_gpus, lent.address) == ("host-aaaaaa", 2, ("10.0.0.1", 7))
        assert changed.is_set()
        provider.ask("job", {"host-aaaaaa": 2})
        wait_until("places", lambda: provider.held("job") == {"host-aaaaaa": (0, 1)}, story=provider.warnings)
        provider.drop("job", {"host-aaaaaa": (0, 1)})
        assert provider.held("job") == {}
        assert provider.warnings() == ()
    finally:
        provider.close()
    assert notes.read_text().splitlines() == ["removed job:host-aaaaaa"] * 2 + ["released"]
