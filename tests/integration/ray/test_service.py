"""The whole of it on a Ray cluster: a service, three nodes of four slots, training jobs that share and outlive both."""

import collections
import json
import os
import signal
import subprocess
import sys

import pytest
from tests.integration.ray import curve
from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import SECRET
from tests.support.service_calls import answer_of

from pollux.storage.state_file import write_state
from pollux.testing.jobs import float64_job
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime

SERVICE = "training"
SEEDS = {"first": 1, "second": 2, "third": 3, "fourth": 4}
EPOCHS = 60


class Service:
    """`pollux up --backend ray` in a folder of its own, and its REST API."""

    def __init__(self, home, cluster, *options):
        self.home, self.cluster, self.options = home, cluster, ("cpu_places=yes", *options)
        # The name and the secret of those before: their hosts are up.
        home.mkdir(mode=0o700)
        (home / "run").mkdir()
        write_state(home / "run" / "fleet.secret", SECRET.encode())
        (home / "ray.json").write_text(json.dumps({"service": SERVICE}))
        self.up()

    def up(self):
        told = ["--backend", "ray", "--address", self.cluster.address]
        told += [word for option in self.options for word in ("--option", option)]
        self.pollux("up", "--detach", "--host", "127.0.0.1", "--port", "0", *told)
        said = json.loads((self.home / "service.json").read_text())
        self.url, self.pid = said["url"], said["pid"]
        self.token = (self.home / "token").read_text().strip()

    def pollux(self, *arguments):
        environ = {**os.environ, "POLLUX_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pollux", *arguments]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr + self.log()
        return done.stdout

    def log(self):
        path = self.home / "service.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def call(self, path, body=None):
        return json.loads(answer_of(self.url + path, self.token, body))

    def jobs(self):
        return {job["id"]: job for job in self.call("/v1/jobs?limit=100")["jobs"]}

    def nodes(self):
        return {node["id"]: node["gpus"] for node in self.call("/v1/status")["nodes"]}

    def until(self, what, is_so):
        """The jobs, once that is so of them."""

        def seen():
            jobs = self.jobs()
            bad = [job for job in jobs.values() if job["state"] in ("failed", "cancelled") or job["crashes"]]
            assert not bad, (bad, self.log())
            return jobs if is_so(jobs) else None

        try:
            return wait(what, seen)
        except OutOfTime:
            print(json.dumps([self.jobs(), self.call("/v1/status")], indent=1), self.log())
            raise

    def submit(self, name, gpus):
        folder = self.home / name
        folder.mkdir()
        run = [sys.executable, curve.__file__, str(folder), str(EPOCHS), str(SEEDS[name])]
        asked = {"name": name, "run": run, "gpus": str(gpus), "on_resize": "live", "grace": "40s"}
        self.call("/v1/jobs", {**asked, "workdir": str(self.home)})

    def resize(self, **gpus):
        """Ask for other counts, and wait until jobs run so; who has grown over nodes with all its processes kept."""
        before = self.replicas()
        for name, count in gpus.items():
            self.call(f"/v1/jobs/{name}/resize", {"gpus": str(count)})
        jobs = self.until(
            str(gpus), lambda jobs: all(runs(jobs[name]) and jobs[name]["gpus"] == gpus[name] for name in gpus)
        )
        after = self.replicas()
        return [name for name in gpus if len(jobs[name]["placement"]) > 1 and before[name] < after[name]]

    def replicas(self):
        """Process numbers of the living, by job."""
        return {name: set(float64_job.living(self.home / name)) for name in self.jobs()}

    def agree(self):
        """Ray's nodes and placement groups are what was decided; what is given back is so a moment later."""

        def seen():
            rows = [row for row in self.cluster("nodes") if row["Alive"] and row["Resources"].get("GPU")]
            names = {row["NodeID"]: next(n for n in self.nodes() if n.endswith(row["NodeID"][-6:])) for row in rows}
            assert self.nodes() == {names[row["NodeID"]]: row["Resources"]["GPU"] for row in rows}
            before = {name: job["placement"] for name, job in self.jobs().items() if job["placement"]}
            booked: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
            for group, node in self.cluster.groups(service=f"pollux:{SERVICE}:").items():
                booked[group.split(":")[2]][names[node]] += 1
            return before if before == booked and len(before) == len(self.jobs()) else None

        return wait("agreement with Ray's books", seen)


def runs(job):
    return job["state"] == "running" and job["resize_kind"] == "live"


@pytest.fixture
def service(cluster, tmp_path):
    running = Service(tmp_path / "home", cluster)
    yield running
    running.pollux("down")
    assert not any(float64_job.living(running.home / name) for name in SEEDS)


def test_jobs_share_the_nodes_and_train_as_if_alone_whatever_happens_to_the_service(service, cluster):
    wait("nodes", lambda: sorted(service.nodes().values()) == [4, 4, 4])
    for name in SEEDS:
        service.submit(name, "1..8")
    service.until("start of all", lambda jobs: all(runs(job) for job in jobs.values()))
    service.agree()
    steps = [service.resize(first=5, second=2, third=2, fourth=1)]
    service.agree()

    before, groups, replicas = service.jobs(), cluster.groups(service=f"pollux:{SERVICE}:"), service.replicas()
    os.kill(service.pid, signal.SIGKILL)
    service.up()
    after = service.until("jobs", lambda jobs: all(runs(job) for job in jobs.values()))
    for key in ("generation", "placement", "crashes", "restarts"):
        assert [job[key] for job in after.values()] == [before[name][key] for name in after], "relaunched needlessly"
    assert service.agree() == {name: job["placement"] for name, job in before.items()}
    assert (service.replicas(), cluster.groups(service=f"pollux:{SERVICE}:")) == (replicas, groups)

    steps.append(service.resize(first=2, second=6))
    service.agree()
    # The policy chooses the nodes, and may move a whole job. One that grows to nearly all nodes keeps some.
    for first, second in ((1, 8), (8, 1), (1, 8), (8, 1)):
        if not any(steps):
            steps.append(service.resize(first=first, second=second))
    assert any(steps), "no job grew over nodes with its processes kept: this test shows nothing"
    (service.home / "fast").touch()
    service.until("end of all", lambda jobs: all(job["state"] == "succeeded" for job in jobs.values()))
    for name, seed in SEEDS.items():
        receipt = json.loads((service.home / "receipts" / name / "receipt.json").read_text())
        assert [entry["samples"] for entry in receipt["ledger"]] == [curve.SAMPLES] * EPOCHS
        assert receipt["exact"]
        expected = curve.expected(EPOCHS, seed)
        assert curve.found(service.home / name) == pytest.approx(expected, rel=1e-9)
        rows = service.call(f"/v1/jobs/{name}/series?kind=report")["rows"]
        assert rows[-1]["values"]["metrics"]["loss"] == pytest.approx(expected[-1], rel=1e-9)
    wait("empty books", lambda: not cluster.groups(service=f"pollux:{SERVICE}:"))
