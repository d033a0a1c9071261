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

from pollux.backends import _ray_host
from pollux.backends._asking import ask_host
from pollux.backends._devices import Devices
from pollux.backends._ray_host import NodeHost, secret_digest
from pollux.core import Node
from pollux.core.errors import BackendFailed

SECRET = "ab" * 32
KEEPER = """
import asyncio, json, sys
from pollux.backends._ray_host import NodeHost
actor = NodeHost("n", 3, "127.0.0.1", sys.argv[1], True, False)
print(json.dumps(asyncio.run(actor.report())), flush=True)
sys.stdin.read()
"""


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_it_says_where_its_host_is_and_how_it_ended():
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False)
    said = asyncio.run(actor.report())
    assert (said["node"], said["places"], said["gpus"]) == ("n", 2, [])
    assert said["secret"] == secret_digest(SECRET)
    assert SECRET not in json.dumps(said)
    address = (said["address"], said["port"])
    assert ask_host(address, bytes.fromhex(SECRET), {"see": ["/"]}, 60.0)["seen"] == [True]
    os.kill(said["pid"], 9)
    assert asyncio.run(actor.watch()) == -9


def test_a_question_is_not_asked_for_ever(monkeypatch):
    monkeypatch.setattr(_ray_host, "_WATCH_SECONDS", 0.0)
    monkeypatch.setattr(_ray_host, "_WATCH_POLL_SECONDS", 0.0)
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False)
    said = asyncio.run(actor.report())
    assert asyncio.run(actor.watch()) is None
    os.kill(said["pid"], 9)
    monkeypatch.undo()
    assert asyncio.run(actor.watch()) == -9


@pytest.fixture
def ended(monkeypatch):
    """Set when the actor ends itself."""
    ended = threading.Event()
    monkeypatch.setattr(_ray_host, "_end_actor", ended.set)
    monkeypatch.setattr(_ray_host, "_MIND_SECONDS", 0.01)
    return ended


def test_without_work_and_questions_host_and_actor_end(ended, monkeypatch):
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False)
    said = asyncio.run(actor.report())
    monkeypatch.setattr(_ray_host, "_PARTED_SECONDS", 0.0)
    asyncio.run(actor.part())
    assert ended.wait(60)
    assert not lives(said["pid"])
    assert not actor._folder.exists()


def test_work_and_questions_keep_a_host(ended, monkeypatch):
    works = threading.Event()
    monkeypatch.setattr(_ray_host, "_has_work", lambda pid: works.is_set())
    monkeypatch.setattr(_ray_host, "_PARTED_SECONDS", 0.2)
    works.set()
    actor = NodeHost("n", 2, "127.0.0.1", SECRET, False, False)
    said = asyncio.run(actor.report())
    asyncio.run(actor.part())
    assert not ended.wait(0.5)
    # Somebody is back before the time is over.
    monkeypatch.setattr(_ray_host, "_WATCH_SECONDS", 0.0)
    assert asyncio.run(actor.watch()) is None
    works.clear()
    assert not ended.wait(0.5)
    assert lives(said["pid"])
    asyncio.run(actor.part())
    assert ended.wait(60)


def test_a_host_without_children_has_no_work():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as idle:
        assert not _ray_host._has_work(idle.pid)
        assert _ray_host._has_work(os.getpid())
        idle.stdin.close()


def test_a_node_that_has_fewer_gpus_than_ray_believes_is_not_used(monkeypatch):
    found = Devices(Node("n", 2, "H100"), (0, 1), (0,))
    monkeypatch.setattr(_ray_host, "find_devices", lambda slots, environ: found)
    with pytest.raises(BackendFailed, match=r"lends the GPUs 0, 1, 2, 3 there, and the driver shows 0, 1: .*gpus=2"):
        NodeHost("n", 4, "127.0.0.1", SECRET, True, False)
    _ray_host._compare([1, 0])


def test_the_host_ends_with_the_actor_however_that_ends():
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,5,6"}
    words = [sys.executable, "-c", KEEPER, SECRET]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as keeper:
        said = json.loads(keeper.stdout.readline())
        assert said["gpus"] == [4, 5, 6]
        keeper.kill()
    deadline = time.monotonic() + 60
    while lives(said["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
