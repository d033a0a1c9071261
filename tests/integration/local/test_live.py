"""A real training job that grows, shrinks and loses a replica in its living processes, under the real service."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import slow_until
from tests.support.service_calls import answer_of

from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "demo" / "train.py"
SLOTS = 3
EPOCHS = 20


class Service:
    """`pollux up` in a folder of its own, and its REST API."""

    def __init__(self, home, **variables):
        self.home = home
        self.variables = variables
        home.mkdir()
        self.pollux("up", "--detach", "--slots", str(SLOTS), "--port", "0")
        self.url = json.loads((home / "service.json").read_text())["url"]
        self.token = (home / "token").read_text().strip()

    def pollux(self, *arguments):
        environ = {**os.environ, "POLLUX_HOME": str(self.home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environ |= self.variables
        command = [sys.executable, "-m", "pollux", *arguments]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def call(self, path, body=None):
        return json.loads(answer_of(self.url + path, self.token, body))

    def until(self, what, is_so, name="digits"):
        def seen():
            job = self.call(f"/v1/jobs/{name}")["job"]
            if is_so(job):
                return job
            assert job["state"] not in ("failed", "cancelled", "succeeded"), job
            return None

        return wait_until(what, seen, PATIENCE_SECONDS, 0.1, lambda: self.call(f"/v1/jobs/{name}"))

    def resize(self, gpus, name="digits"):
        self.call(f"/v1/jobs/{name}/resize", {"gpus": str(gpus)})
        return self.until(f"{gpus} GPUs", lambda job: job["gpus"] == gpus and job["state"] == "running", name)

    def told(self, name):
        """What is known of a job: the service's facts, and what its replicas printed."""
        logs = sorted((self.home / "logs" / name).glob("*.log"))
        printed = [f"{path.name}: {path.read_text()}" for path in logs]
        return "\n".join([self.pollux("history", "export"), *printed])

    def replicas(self, generation):
        record = json.loads((self.home / "run" / "digits" / f"generation-{generation}.json").read_text())
        return [pid for pid, _, _ in record["replicas"]]


@pytest.fixture
def service(tmp_path):
    running = Service(tmp_path / "home")
    yield running
    running.pollux("down")


@pytest.fixture
def hasty_service(tmp_path):
    """Does not wait long for the first sign of an agent's life: twice this."""
    running = Service(tmp_path / "home", POLLUX_HANG_SECONDS="3")
    yield running
    running.pollux("down")


def test_a_job_changes_and_loses_replicas_without_a_restart(service):
    changed = service.home / "changed"
    run = slow_until.command(changed, SCRIPT, "--epochs", str(EPOCHS), "--copies", "1", "--step-wait", "0.2")
    asked = {"name": "digits", "run": run, "gpus": "1", "on_resize": "live", "grace": "20s"}
    service.call("/v1/jobs", {**asked, "workdir": str(service.home)})
    first = service.until("live agent", lambda job: job["state"] == "running" and job["resize_kind"] == "live")
    (process,) = service.replicas(first["generation"])

    grown = service.resize(3)
    assert process in service.replicas(grown["generation"])
    shrunk = service.resize(2)
    assert service.replicas(shrunk["generation"])[0] == process

    # From here on it may go on with one.
    service.call("/v1/jobs/digits/resize", {"gpus": "1..2"})
    before = service.until("rest", lambda job: job["state"] == "running")
    os.kill(service.replicas(before["generation"])[-1], signal.SIGKILL)
    service.until("loss", lambda job: job["generation"] > before["generation"] and job["state"] == "running")
    changed.touch()
    ended = service.until("end", lambda job: job["state"] == "succeeded")

    assert ended["crashes"] == 0
    assert {"grow", "shrink"} <= ended["resize_costs"].keys()
    receipt = json.loads((service.home / "receipts" / "digits" / "receipt.json").read_text())
    assert len(receipt["ledger"]) == EPOCHS
    assert {entry["samples"] for entry in receipt["ledger"]} == {1437}, "a pass lost or repeated samples"
    assert len({entry["hash"] for entry in receipt["ledger"]}) == 1, "a pass had other samples than the rest"
    assert receipt["exact"]


PLAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
if os.environ["RANK"] == "0":
    time.sleep(1.0)  # The others must not meet the first one of an earlier generation.
dist.init_process_group("gloo")
print("world", dist.get_world_size(), flush=True)
through = torch.zeros(1)
while not through:
    through.fill_(pathlib.Path("finish").exists())
    dist.all_reduce(through, dist.ReduceOp.MAX)
    time.sleep(0.02)
dist.destroy_process_group()
"""


def test_an_elastic_job_without_an_agent_is_restarted(hasty_service):
    service = hasty_service
    (service.home / "plain.py").write_text(PLAIN)
    asked = {"name": "plain", "run": [sys.executable, "plain.py"], "gpus": "1..3", "workdir": str(service.home)}
    service.call("/v1/jobs", {**asked, "grace": "20s"})
    service.until("start", lambda job: job["state"] == "running", "plain")
    gpus = 1 if service.call("/v1/jobs/plain")["job"]["gpus"] == 3 else 3
    log = service.home / "logs" / "plain" / "0.log"
    # The second of them by a supervisor that has started replicas before.
    for size in (gpus, 2):
        service.resize(size, "plain")
        service.until("world", lambda job, size=size: log.read_text().endswith(f"world {size}\n"), "plain")
        assert service.call("/v1/jobs/plain")["job"]["resize_kind"] == "restart"
    (service.home / "finish").touch()
    ended = service.until("end", lambda job: job["state"] == "succeeded", "plain")
    assert ended["crashes"] == 0, service.told("plain")


def test_the_end_of_a_log_is_known_from_its_last_byte(service):
    """`pollux logs` asks for it first; the last character here has two bytes."""
    text = "é" * 100_000
    run = [sys.executable, "-X", "utf8", "-c", f"print({text[0]!r} * {len(text)}, end='')"]
    service.call("/v1/jobs", {"name": "words", "run": run, "gpus": "1", "workdir": str(service.home)})
    service.until("end", lambda job: job["state"] == "succeeded", "words")
    answer = service.call("/v1/jobs/words/logs?offset=-1&limit=1")
    assert (answer["offset"], answer["at_end"]) == (len(text.encode()), True)
    assert service.pollux("logs", "words") == service.pollux("logs", "--tail", "1", "words") == text
