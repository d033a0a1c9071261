"""A real service on a real Slurm cluster: training over nodes that die, are drained, and outlive the service."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "demo" / "train.py"
KILLS = int(os.environ.get("POLLUX_FAULT_EVENTS", "1"))
LIMIT_SECONDS = 60 + 60 * KILLS
OPTIONS = {
    "nodes": "3", "gpus_per_node": "4", "cpus_per_node": "8", "partition": "main", "time_limit": "30:00",
    "poll_seconds": "1", "head": "127.0.0.1", "idle_seconds": "0",
}  # fmt: skip


class Service:
    """`pollux up --backend slurm` in a folder of its own, and its REST API."""

    def __init__(self, home, slurm):
        self.home, self.slurm = home, slurm
        home.mkdir()
        self.up()

    def up(self):
        options = {**OPTIONS, "pool": self.home / "pool"}
        words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
        self.pollux("up", "--detach", "--port", "0", "--backend", "slurm", "--slots", "2", *words)
        told = json.loads((self.home / "service.json").read_text())
        self.url, self.pid = told["url"], told["pid"]
        self.token = (self.home / "token").read_text().strip()

    def pollux(self, *arguments):
        environ = {
            **os.environ, "POLLUX_HOME": str(self.home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "POLLUX_LEASE_SECONDS": "6", "POLLUX_LOST_SECONDS": "8",
        }  # fmt: skip
        command = [sys.executable, "-m", "pollux", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr + self.log()
        return done.stdout

    def call(self, path, body=None):
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=30) as response:
            return json.load(response)

    def wait(self, what, is_so):
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := is_so()):
            assert time.monotonic() < deadline, f"no {what}: {self.state()}"
            time.sleep(0.1)
        return found

    def log(self):
        path = self.home / "service.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def state(self):
        seen = [self.call("/v1/status")["nodes"], self.call("/v1/jobs")]
        return json.dumps(seen) + self.log() + self.slurm.run("squeue")

    def nodes(self):
        return {node["id"]: node for node in self.call("/v1/status")["nodes"]}

    def until(self, job_id, what, is_so):
        def seen():
            job = self.call(f"/v1/jobs/{job_id}")["job"]
            assert job["state"] not in ("failed", "cancelled"), (job, self.state())
            return job if is_so(job) else None

        return self.wait(what, seen)

    def submit(self, name, epochs, gpus):
        run = [sys.executable, str(SCRIPT), "--epochs", str(epochs), "--copies", "1", "--step-wait", "0.02"]
        asked = {"name": name, "run": run, "gpus": str(gpus), "on_resize": "live", "grace": "20s"}
        self.call("/v1/jobs", {**asked, "workdir": str(self.home)})

    def resize(self, name, gpus):
        self.call(f"/v1/jobs/{name}/resize", {"gpus": str(gpus)})

    def trained_exactly(self, name, epochs):
        """Every pass had every sample once, whatever happened."""
        job = self.until(name, "end", lambda job: job["state"] == "succeeded")
        assert job["crashes"] == 0
        receipt = json.loads((self.home / "receipts" / name / "receipt.json").read_text())
        assert len(receipt["ledger"]) == epochs
        assert {entry["samples"] for entry in receipt["ledger"]} == {1437}, "a pass lost or repeated samples"
        assert len({entry["hash"] for entry in receipt["ledger"]}) == 1, "a pass had other samples than the rest"
        assert receipt["exact"]
        return job

    def pilots(self):
        """Node to what its pilot holds there, by Slurm's own books."""
        lines = self.slurm.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%N|%b").splitlines()
        return dict(line.split("|") for line in lines)


@pytest.fixture(scope="module")
def service(slurm, tmp_path_factory):
    running = Service(tmp_path_factory.mktemp("service") / "home", slurm)
    running.wait("three nodes", lambda: len(running.nodes()) == 3)
    yield running
    try:
        running.pollux("down")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)
    slurm.run("scancel", "--user=root")
    slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")


def is_live(job):
    return job["state"] == "running" and job["resize_kind"] == "live"


def test_a_drained_node_is_left_with_the_work_saved(service):
    service.submit("moved", 4, 2)
    (node,) = service.until("moved", "live job", is_live)["placement"]
    service.slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")
    service.until(
        "moved", "move", lambda job: is_live(job) and job["placement"].keys() - {node} == set(job["placement"])
    )
    assert node not in service.nodes()
    service.slurm.wait_for(lambda: service.slurm.states()[node] == "drained", "drained node")
    service.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    service.trained_exactly("moved", 4)
    service.wait("node again", lambda: len(service.nodes()) == 3)


def check_books(service, placement):
    """What the service has is what Slurm has lent it."""
    pilots = service.pilots()
    assert set(pilots) == set(service.nodes()) >= set(placement)
    assert {gres.replace("/", ":") for gres in pilots.values()} == {"gres:gpu:4"}
    assert set(service.slurm.states().values()) <= {"mixed", "allocated"}


def test_a_job_over_nodes_outlives_the_service_and_nodes(service):
    # Each further kill waits until its node is there again.
    epochs = 12 if KILLS == 1 else 30 * KILLS
    service.submit("wide", epochs, 4)
    job = service.until("wide", "live job", is_live)
    assert sorted(job["placement"].values()) == [2, 2]
    check_books(service, job["placement"])
    before = service.slurm.run("squeue", "-h", "-r", "-o", "%i").split()

    os.kill(service.pid, signal.SIGKILL)
    service.up()
    again = service.until("wide", "job", lambda job: job["state"] == "running")
    assert (again["generation"], again["placement"]) == (job["generation"], job["placement"]), "relaunched needlessly"
    assert service.slurm.run("squeue", "-h", "-r", "-o", "%i").split() == before

    service.resize("wide", "2..4")
    seconds = [kill_a_node(service, again=number + 1 < KILLS) for number in range(KILLS)]
    print(f"a node died under its job {KILLS} times; it ran on after {', '.join(f'{each:.1f}' for each in seconds)} s")
    service.trained_exactly("wide", epochs)


def kill_a_node(service, again):
    """Seconds from the end of a node under a job until that runs without it; `again`: the node comes back."""
    job = service.until("wide", "several nodes", lambda job: is_live(job) and len(job["placement"]) > 1)
    node = list(job["placement"])[-1]
    began = time.monotonic()
    service.slurm.kill_node(node)
    service.until("wide", "loss", lambda job: is_live(job) and job["placement"] and node not in job["placement"])
    seconds = time.monotonic() - began
    service.wait("node gone", lambda: node not in service.nodes())
    service.slurm.start_node(node)
    if again:
        service.wait("node again", lambda: len(service.nodes()) == 3)
        # The policy may have found that fewer are faster on this machine.
        service.resize("wide", 4)
        service.until("wide", "four replicas", lambda job: is_live(job) and job["gpus"] == 4)
        service.resize("wide", "2..4")
    return seconds
