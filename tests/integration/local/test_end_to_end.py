"""The whole of it on one machine: a service, CPU slots, real training jobs that come and go."""

import json
import os
import runpy
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.support.service_calls import answer_of

from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "examples" / "demo" / "train.py"
SLOTS = 3
QUICK = ("--copies", "1", "--step-wait", "0.004", "--sample-wait", "0.0002")


def environment(home):
    return {**os.environ, "POLLUX_HOME": str(home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def pollux(home, *arguments):
    command = [sys.executable, "-m", "pollux", *arguments]
    return subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


class Service:
    """`pollux up` in a folder of its own, and its REST API."""

    def __init__(self, home):
        self.home = home
        home.mkdir(mode=0o700)
        (home / "noted").mkdir()
        (home / "registering.py").write_text(REGISTERING)
        started = pollux(home, "up", "--detach", "--slots", str(SLOTS), "--port", "0")
        assert started.returncode == 0, started.stderr
        self.url = json.loads((home / "service.json").read_text())["url"]
        self.token = (home / "token").read_text().strip()

    def call(self, path, body=None):
        return json.loads(answer_of(self.url + path, self.token, body))

    def submit(self, name, *arguments, gpus=f"1..{SLOTS}", **more):
        noted = [str(self.home / "registering.py"), str(self.home / "noted")]
        run = [sys.executable, *noted, str(SCRIPT), *QUICK, *arguments]
        body = {"name": name, "run": run, "gpus": gpus, "workdir": str(self.home), "grace": "20s", **more}
        return self.call("/v1/jobs", body)

    def wait(self, *names):
        def ended():
            jobs = {job["id"]: job for job in self.call("/v1/jobs?limit=100")["jobs"]}
            through = [jobs[name]["state"] in ("succeeded", "failed", "cancelled") for name in names]
            return jobs if all(through) else None

        return wait_until(f"end of {names}", ended, PATIENCE_SECONDS, 0.2, lambda: self.call("/v1/jobs?limit=100"))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One service for all tests of this file: it takes seconds until it can start a job at once."""
    running = Service(tmp_path_factory.mktemp("end-to-end") / "home")
    yield running
    down = pollux(running.home, "down")
    assert down.returncode == 0, down.stderr
    assert replicas(running.home) == []


@pytest.fixture
def service(running):
    """The same, with nothing left by the test before."""
    yield running
    wait_until("end of the replicas", lambda: not replicas(running.home))


REGISTERING = """
import os, runpy, sys
folder, sys.argv = sys.argv[1], sys.argv[2:]
with open(f"/proc/{os.getpid()}/stat") as file:
    began = file.read().rsplit(") ", 1)[1].split()[19]
open(os.path.join(folder, f"{os.getpid()}-{began}"), "w").close()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def replicas(home):
    """Process ids of living replicas: each has noted its own, with its start time, before anything else."""
    return [name for name in os.listdir(home / "noted") if is_alive(*name.split("-"))]


def is_alive(pid, began):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return False
    return fields[19] == began and fields[0] not in "ZX"


class Census(threading.Thread):
    """Counts living replicas all the time."""

    def __init__(self, home):
        super().__init__(daemon=True)
        self.home, self.most, self.done = home, 0, threading.Event()

    def run(self):
        while not self.done.wait(0.02):
            self.most = max(self.most, len(replicas(self.home)))


def script(folder: str, options: list[str]) -> None:
    """Run in a replica: the script as `python train.py options` would run it."""
    os.chdir(folder)
    sys.argv = [str(SCRIPT), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")


def alone(replica_server, tmp_path, *arguments):
    """The accuracy that the same script has without a scheduler."""
    options = [*QUICK, "--step-wait", "0", "--sample-wait", "0", *arguments]
    given = {"folder": str(tmp_path), "options": options}
    (done,) = replica_server.start(f"{Path(__file__).resolve()}:script", 1, given).wait()
    assert done.exit_code == 0, done.output
    return float(done.output.split("accuracy ")[-1].split(",")[0])


def test_jobs_come_and_go_and_all_of_them_train_as_if_alone(service, replica_server, tmp_path):
    census = Census(service.home)
    census.start()
    plan = service.submit("first", "--epochs", "8", "--seed", "1")["plan"]
    assert plan["starts_now"]
    names = ["first"]
    for number, name in enumerate(("second", "third", "fourth"), start=2):
        time.sleep(1.5)
        service.submit(name, "--epochs", "2", "--seed", str(number))
        names.append(name)
        # However the policy decides on this machine, the first job is moved: its user asks for other limits.
        service.call("/v1/jobs/first/resize", {"gpus": ("2..3", "1", "2")[number - 2]})
    jobs = service.wait(*names)
    census.done.set()
    census.join()

    assert {jobs[name]["state"] for name in names} == {"succeeded"}, jobs
    assert 0 < census.most <= SLOTS
    assert jobs["first"]["restarts"] > 0, "nothing was ever moved: this test shows nothing"
    for number, name in enumerate(names, start=1):
        epochs = 8 if name == "first" else 2
        receipt = json.loads((service.home / "receipts" / name / "receipt.json").read_text())
        assert len(receipt["ledger"]) == epochs
        assert {entry["samples"] for entry in receipt["ledger"]} == {1437}, "a pass lost or repeated samples"
        assert len({entry["hash"] for entry in receipt["ledger"]}) == 1, "a pass had other samples than the rest"
        assert receipt["exact"]
        rows = service.call(f"/v1/jobs/{name}/series?kind=report")["rows"]
        expected = alone(replica_server, tmp_path, "--epochs", str(epochs), "--seed", str(number))
        assert rows[-1]["values"]["metrics"]["accuracy"] == pytest.approx(expected, abs=0.003)


def test_a_script_that_knows_nothing_of_us_runs_as_a_rigid_job(service, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "print('sum', int(x), 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    body = {"name": "plain", "run": [sys.executable, str(script)], "gpus": 2, "workdir": str(tmp_path)}
    service.call("/v1/jobs", body)
    job = service.wait("plain")["plain"]
    assert job["state"] == "succeeded", job
    assert job["rigid"]
    for replica in (0, 1):
        assert "sum 3 of 2" in service.call(f"/v1/jobs/plain/logs?replica={replica}")["text"]


def test_a_paused_job_goes_on_where_it_was(service):
    service.submit("pausing", "--epochs", "6", "--step-wait", "0.02")
    # By its own words: the service may be told of a pass long after it.
    wait_until("pass", lambda: "epoch 1:" in service.call("/v1/jobs/pausing/logs?replica=0")["text"])
    assert service.call("/v1/jobs/pausing/pause", {})["job"]["state"] == "paused"
    wait_until("end of the replicas", lambda: not replicas(service.home))
    service.call("/v1/jobs/pausing/resume", {})
    job = service.wait("pausing")["pausing"]
    assert job["state"] == "succeeded", job
    receipt = json.loads((service.home / "receipts" / "pausing" / "receipt.json").read_text())
    assert {entry["samples"] for entry in receipt["ledger"]} == {1437}
    assert len(receipt["ledger"]) == 6
    assert any(event["kind"] == "resumed" for event in receipt["events"])


def test_a_cancelled_job_is_gone_and_cancelling_it_again_is_a_conflict(service):
    service.submit("unwanted", "--epochs", "500")
    assert service.call("/v1/jobs/unwanted/cancel", {})["job"]["state"] == "cancelled"
    with pytest.raises(urllib.error.HTTPError) as refused:
        service.call("/v1/jobs/unwanted/cancel", {})
    with refused.value as answer:
        assert answer.code == 409
    wait_until("end of the replicas", lambda: not replicas(service.home))


def test_a_job_that_hangs_fails_at_its_time_limit_and_leaves_no_process(service, tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(
        "import os, signal, pathlib\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "while True:\n"
        "    pass\n"
    )
    run = [sys.executable, str(script)]
    limits = {"time_limit": "4s", "grace": "1s", "retries": 0}
    service.call("/v1/jobs", {"name": "hanging", "run": run, "gpus": 1, "workdir": str(tmp_path), **limits})
    job = service.wait("hanging")["hanging"]
    assert job["state"] == "failed"
    assert "limit" in job["detail"]
    pid = int((tmp_path / "pid").read_text())
    wait_until("end of its process", lambda: not Path(f"/proc/{pid}").exists())
