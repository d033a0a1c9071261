"""The actor's part without Ray: it keeps a real host, which ends with it."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from pollux.backends import _ray_host
from pollux.backends._asking import ask_host
from pollux.backends._ray_host import NodeHost, secret_digest

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
