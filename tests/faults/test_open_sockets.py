"""Every socket of a running local job, as the kernel lists them, under the hands of somebody who knows no secret."""

import json
import os
import urllib.request
from pathlib import Path

import pytest
from tests.support import slow_until

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

attacks = load_module(str(Path(__file__).with_name("store_attacks.py")))
sockets = load_module(str(Path(__file__).with_name("open_sockets.py")))
SERVICE = load_module(str(Path(__file__).parents[1] / "integration" / "local" / "test_live.py"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20220"))


@pytest.fixture
def service(tmp_path):
    running = SERVICE.Service(tmp_path / "home")
    yield running
    running.pollux("down")


def metrics(service) -> str:
    asked = urllib.request.Request(f"{service.url}/metrics", headers={"Authorization": f"Bearer {service.token}"})
    with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())


def test_every_socket_of_a_local_job_stands_a_stranger(service):
    enough = service.home / "enough"
    run = slow_until.command(enough, SERVICE.SCRIPT, "--epochs", "8", "--copies", "1", "--step-wait", "0.2")
    asked = {"name": "digits", "run": run, "gpus": "2", "on_resize": "live", "workdir": str(service.home)}
    service.call("/v1/jobs", asked)
    service.until("a live agent", lambda job: job["state"] == "running" and job["resize_kind"] == "live")
    pid = json.loads((service.home / "service.json").read_text())["pid"]

    def seen():
        processes = sockets.ours(str(service.home))
        found = sockets.opened(processes)
        return (processes, found) if sockets.roles(found, pid) >= {"replica tcp"} else None

    processes, found = wait_until("a group of the replicas", seen, PATIENCE_SECONDS, 0.2)
    wanted = {"service tcp", "pollux-store tcp", "replica tcp", "shim.sock"}
    assert sockets.roles(found, pid) == wanted, found
    assert {each.where[0] for each in found if each.kind != "unix"} == {"127.0.0.1"}, found
    before = sockets.sizes(processes, service.home)

    reached = attacks.as_stranger(sockets.poke, sockets.places(found, service.home, pid), SEED)
    sockets.check_withstood(reached, wanted, before, service.home)

    enough.touch()
    job = service.until("the end", lambda job: job["state"] == "succeeded")
    assert job["crashes"] == 0
    assert service.told("digits").count('"job-running"') == 1
    receipt = json.loads((service.home / "receipts" / "digits" / "receipt.json").read_text())
    assert {entry["samples"] for entry in receipt["ledger"]} == {1437}
    assert len({entry["hash"] for entry in receipt["ledger"]}) == 1
    assert receipt["exact"]
    told = (service.home / "service.log").read_text()
    assert "the job's store refused 127.0.0.1:" in told, "its own log is gone with the job"
    assert "pollux_refused_connections_total 0" not in metrics(service), "they are counted"
