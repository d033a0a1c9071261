"""A job that puts pipes and nonsense into the service's own folder of it, under a real service: others go on."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

SERVICE = load_module(str(Path(__file__).with_name("test_live.py")))
ATTACK = """
import os, pathlib, time
folder = pathlib.Path(os.environ["POLLUX_OUTPUT_DIR"], "..", "..", "run", os.environ["POLLUX_JOB"]).resolve()
generation = os.environ["POLLUX_GENERATION"]
while not (folder / f"ran-{generation}.json").exists():
    time.sleep(0.02)
(folder / f"ran-{generation}.tmp").mkdir()
for name in (f"ran-{generation}.json", f"generation-{generation}.json", "shim.log", "lock"):
    (folder / name).unlink()
    os.mkfifo(folder / name)
(folder / f"ended-{generation}.json").write_text("{}")
(folder / f".ended-{generation}.json.{os.getppid()}.new").mkdir()
pathlib.Path("attacked").touch()
time.sleep(HOW_LONG)
"""


@pytest.fixture
def service(tmp_path):
    running = SERVICE.Service(tmp_path / "home")
    yield running
    running.pollux("down")


def submit(service, name, script):
    (service.home / name).mkdir()
    run = [sys.executable, "-c", script]
    service.call("/v1/jobs", {"name": name, "run": run, "gpus": "1", "workdir": str(service.home / name), "retries": 0})


def test_the_service_its_restart_and_other_jobs_go_on(service):
    submit(service, "ends", ATTACK.replace("HOW_LONG", "0"))
    submit(service, "lives", ATTACK.replace("HOW_LONG", "3600"))
    state = wait_until("an end", lambda: ended(service, "ends"), PATIENCE_SECONDS, 0.1)
    assert state == "succeeded"
    wait_until("the attack", (service.home / "lives" / "attacked").exists)
    submit(service, "other", "print('ran')")
    service.until("other", lambda job: job["state"] == "succeeded", "other")

    os.kill(json.loads((service.home / "service.json").read_text())["pid"], signal.SIGKILL)
    service.pollux("up", "--detach", "--slots", str(SERVICE.SLOTS), "--port", "0")
    service.url = json.loads((service.home / "service.json").read_text())["url"]
    submit(service, "again", "print('ran')")
    service.until("again", lambda job: job["state"] == "succeeded", "again")
    service.call("/v1/jobs/lives/cancel", {})
    wait_until("the end of the attacker", lambda: ended(service, "lives"), PATIENCE_SECONDS, 0.1)
    wait_until("the end of what it runs", lambda: not still_there(service.home / "lives"), PATIENCE_SECONDS, 0.1)
    assert "it counts as missing" in (service.home / "service.log").read_text()


def ended(service, name):
    state = service.call(f"/v1/jobs/{name}")["job"]["state"]
    return state if state in ("succeeded", "failed", "cancelled") else None


def still_there(folder):
    """The processes that work in that folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
    return found
