"""The actor's part without Ray: it keeps a real host, which ends with it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pollux.backends.process.devices import Devices
from pollux.backends.ray import node_actor
from pollux.backends.ray.node_actor import NodeHost, secret_digest
from pollux.backends.transport.query import ask_host
from pollux.core import Node
from pollux.core.errors import BackendFailed
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.live.node_messages import SeeRequest

SECRET = "ab" * 32
KEEPER = """
import asyncio, json, sys
from pollux.backends.ray.node_actor import NodeHost
actor = NodeHost("n", 3, "127.0.0.1", sys.argv[1], True, False, "pollux:s:")
print(json.dumps({**asyncio.run(actor.report()), "pid": actor._process.pid}), flush=True)
sys.stdin.read()
"""


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.fixture
def ended(monkeypatch):
    """Set when the actor ends itself."""
    ended = threading.Event()
    monkeypatch.setattr(node_actor, "_end_actor", ended.set)
    monkeypatch.setattr(node_actor, "_free_groups", lambda prefix, node_id: None)
    monkeypatch.setattr(node_actor, "_IDLE_CHECK_SECONDS", 0.01)
    return ended


def end(actor, ended, monkeypatch):
    """Have it end: what minds it must not come to that later, while other tests run."""
    monkeypatch.setattr(node_actor, "_PARTED_SECONDS", 0.0)
    asyncio.run(actor.release())
    assert ended.wait(PATIENCE_SECONDS)


def test_it_says_where_its_host_is_and_how_it_ended(ended, monkeypatch):
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False, "pollux:s:")
    said = asyncio.run(actor.report())
    assert said["gpus"] == []
    assert said["secret"] == secret_digest(SECRET)
    assert said["options"] == {"places": 2, "with_gpus": False, "warm": False}
    assert said["works"] is False
    assert SECRET not in json.dumps(said)
    address = (said["address"], said["port"])
    assert ask_host(address, bytes.fromhex(SECRET), SeeRequest(("/",)), 60.0).seen == (True,)
    os.kill(actor._process.pid, 9)
    assert asyncio.run(actor.watch()) == -9
    end(actor, ended, monkeypatch)


def test_a_question_is_not_asked_for_ever(ended, monkeypatch):
    monkeypatch.setattr(node_actor, "_WATCH_SECONDS", 0.0)
    monkeypatch.setattr(node_actor, "_WATCH_POLL_SECONDS", 0.0)
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False, "pollux:s:")
    asyncio.run(actor.report())
    assert asyncio.run(actor.watch()) is None
    os.kill(actor._process.pid, 9)
    monkeypatch.setattr(node_actor, "_WATCH_SECONDS", 60.0)
    assert asyncio.run(actor.watch()) == -9
    end(actor, ended, monkeypatch)


def test_without_work_and_questions_host_and_actor_end(ended, monkeypatch):
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False, "pollux:s:")
    asyncio.run(actor.report())
    monkeypatch.setattr(node_actor, "_PARTED_SECONDS", 0.0)
    asyncio.run(actor.release())
    assert ended.wait(PATIENCE_SECONDS)
    assert not lives(actor._process.pid)
    assert not actor._folder.exists()


class PlayedRay:
    """The placement groups of a cluster, by name."""

    def __init__(self, **states):
        self.states = {name.replace("_", ":"): state for name, state in states.items()}
        self.util = self

    def placement_group_table(self):
        return {str(n): {"name": name, "state": state} for n, (name, state) in enumerate(self.states.items())}

    def get_placement_group(self, name):
        return name

    def remove_placement_group(self, name):
        self.states[name] = "REMOVED"


def test_at_the_end_the_service_leaves_no_groups_on_the_node(ended, monkeypatch):
    ray = PlayedRay(
        pollux_s_j_n_1="CREATED", pollux_s_j_n_2="PENDING", pollux_s_j_m_3="CREATED", pollux_other_j_n_1="CREATED",
        foreign="CREATED",
    )  # fmt: skip
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", ray)
    node_actor._free_groups("pollux:s:", "n")
    left = [name for name, state in ray.states.items() if state != "REMOVED"]
    assert left == ["pollux:s:j:m:3", "pollux:other:j:n:1", "foreign"]


def test_groups_are_given_back_once_the_host_has_ended_and_before_the_actor_does(ended, monkeypatch):
    happened = []

    def free(prefix, node_id):
        happened.append((prefix, node_id, lives(actor._process.pid), ended.is_set()))
        raise RuntimeError("Ray does not answer")

    monkeypatch.setattr(node_actor, "_free_groups", free)
    monkeypatch.setattr(node_actor, "_PARTED_SECONDS", 0.0)
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False, "pollux:s:")
    asyncio.run(actor.report())
    asyncio.run(actor.release())
    assert ended.wait(PATIENCE_SECONDS)
    assert happened == [("pollux:s:", "n", False, False)]


def test_work_and_questions_keep_a_host(ended, monkeypatch):
    works = threading.Event()
    monkeypatch.setattr(node_actor, "has_replicas", lambda pid: works.is_set())
    monkeypatch.setattr(node_actor, "_PARTED_SECONDS", 0.2)
    works.set()
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False, "pollux:s:")
    asyncio.run(actor.report())
    asyncio.run(actor.release())
    assert not ended.wait(0.5)
    # Somebody is back before the time is over.
    monkeypatch.setattr(node_actor, "_WATCH_SECONDS", 0.0)
    assert asyncio.run(actor.watch()) is None
    works.clear()
    assert not ended.wait(0.5)
    assert lives(actor._process.pid)
    asyncio.run(actor.release())
    assert ended.wait(PATIENCE_SECONDS)


def test_a_host_without_children_has_no_work():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as idle:
        assert not node_actor.has_replicas(idle.pid)
        assert node_actor.has_replicas(os.getpid())
        idle.stdin.close()


def test_a_node_that_has_fewer_gpus_than_ray_believes_is_not_used(monkeypatch):
    found = Devices(Node("n", 2, "H100"), (0, 1), (0,))
    monkeypatch.setattr(node_actor, "find_devices", lambda slots, environ: found)
    with pytest.raises(BackendFailed, match=r"lends the GPUs 0, 1, 2, 3 there, and the driver shows 0, 1: .*gpus=2"):
        NodeHost("n", 4, "127.0.0.1", SECRET, True, False, "pollux:s:")
    node_actor._compare([1, 0])


def test_the_host_ends_with_the_actor_however_that_ends():
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6"}
    words = [sys.executable, "-c", KEEPER, SECRET]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as keeper:
        said = json.loads(keeper.stdout.readline())
        assert said["gpus"] == [4, 5, 6]
        keeper.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while lives(said["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
