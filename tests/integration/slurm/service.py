"""A real service on a Slurm cluster, in a folder of its own, as tests see it: its commands, its REST API, its log."""

import contextlib
import json
import os
import signal
import subprocess
import sys

from tests.support.service_calls import answer_of

from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

OPTIONS = {
    "nodes": "3", "gpus_per_node": "4", "cpus_per_node": "8", "partition": "main", "time_limit": "30:00",
    "poll_seconds": "1", "head": "127.0.0.1", "idle_seconds": "0",
}  # fmt: skip


class Service:
    """`pollux up --backend slurm` with so many CPU slots on each node, 0: GPUs; `environ` beside that of the tests."""

    def __init__(self, home, slurm, slots, options=None, **environ):
        self._options = {**OPTIONS, **(options or {}), "pool": home / "pool"}
        self.home, self.slurm, self.slots, self._environ = home, slurm, slots, environ
        home.mkdir()
        self.up()

    def up(self):
        """Start it; what it said is in `said`."""
        words = [word for name, value in self._options.items() for word in ("--option", f"{name}={value}")]
        words += ["--slots", str(self.slots)] if self.slots else []
        self.said = self.pollux("up", "--detach", "--port", "0", "--backend", "slurm", *words)
        told = json.loads((self.home / "service.json").read_text())
        self.url, self.pid = told["url"], told["pid"]
        self.token = (self.home / "token").read_text().strip()

    def pollux(self, *arguments):
        done = self.command(*arguments)
        assert done.returncode == 0, done.stderr + self.log()
        return done.stdout + done.stderr

    def command(self, *arguments):
        """The command as it ended, whichever way."""
        environ = {
            **os.environ, "POLLUX_HOME": str(self.home), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            **self._environ,
        }  # fmt: skip
        command = [sys.executable, "-m", "pollux", *arguments]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )

    def call(self, path, body=None):
        return json.loads(self._text(path, body))

    def history(self):
        """Everything that happened, a value for each line."""
        return [json.loads(line) for line in self._text("/v1/history").splitlines()]

    def _text(self, path, body=None):
        return answer_of(self.url + path, self.token, body)

    def wait(self, what, is_so):
        return wait_until(what, is_so, pause_seconds=0.1, story=self.state)

    def log(self):
        path = self.home / "service.log"
        return path.read_text()[-3000:] if path.exists() else ""

    def state(self):
        seen = [self.call("/v1/status")["nodes"], self.call("/v1/jobs")]
        queue = ""
        with contextlib.suppress(subprocess.SubprocessError):
            queue = self.slurm.run("squeue")
        return json.dumps(seen) + self.log() + queue

    def nodes(self):
        return {node["id"]: node for node in self.call("/v1/status")["nodes"]}

    def jobs(self):
        return {job["id"]: job for job in self.call("/v1/jobs?limit=100")["jobs"]}

    def until(self, job_id, what, is_so):
        def seen():
            job = self.call(f"/v1/jobs/{job_id}")["job"]
            assert job["state"] not in ("failed", "cancelled"), (job, self.state())
            return job if is_so(job) else None

        return self.wait(what, seen)

    def submit(self, name, run, gpus, **more):
        asked = {"name": name, "run": [sys.executable, *map(str, run)], "gpus": str(gpus), "on_resize": "live"}
        self.call("/v1/jobs", {**asked, "grace": "20s", "workdir": str(self.home), **more})

    def resize(self, name, gpus):
        self.call(f"/v1/jobs/{name}/resize", {"gpus": str(gpus)})

    def ended_well(self, name, epochs, samples):
        """Every pass had every sample once, whatever happened; the job."""
        job = self.until(name, "end", lambda job: job["state"] == "succeeded")
        assert job["crashes"] == 0
        receipt = self.receipt(name)
        assert len(receipt["ledger"]) == epochs
        assert {entry["samples"] for entry in receipt["ledger"]} == {samples}, "a pass lost or repeated samples"
        assert len({entry["hash"] for entry in receipt["ledger"]}) == 1, "a pass had other samples than the rest"
        assert receipt["exact"]
        return job

    def receipt(self, name):
        return json.loads((self.home / "receipts" / name / "receipt.json").read_text())

    def pilots(self):
        """Node to what its pilot holds there, by Slurm's own books."""
        lines = self.slurm.run("squeue", "-h", "-r", "-t", "RUNNING", "-p", "main", "-o", "%N|%b").splitlines()
        return dict(line.split("|") for line in lines)

    def check_books(self):
        """What the service has is what Slurm has lent it, and jobs are nowhere else."""
        pilots, nodes = self.pilots(), self.nodes()
        assert set(pilots) == set(nodes)
        assert {gres.replace("/", ":") for gres in pilots.values()} == {"gres:gpu:4"}
        assert set(self.slurm.states().values()) <= {"mixed", "allocated"}
        used = dict.fromkeys(nodes, 0)
        for job in self.jobs().values():
            for name, count in job["placement"].items():
                used[name] += count
        assert max(used.values()) <= self.slots

    def kill_and_follow(self):
        """End the service as a crash would, and start the next: neither Slurm's jobs nor ours were started anew."""
        queue = ("squeue", "-h", "-r", "-o", "%i %T")
        before = {name: job for name, job in self.jobs().items() if is_live(job)}
        pilots = self.slurm.run(*queue)
        assert before
        os.kill(self.pid, signal.SIGKILL)
        self.up()
        for name, job in before.items():
            now = self.until(name, "job after the kill", is_live)
            assert (now["generation"], now["placement"]) == (job["generation"], job["placement"]), (
                "relaunched needlessly"
            )
        assert self.slurm.run(*queue) == pilots

    def end(self):
        """Down, and the nodes given back."""
        try:
            self.pollux("down")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.slurm.run("scancel", "--user=root")
            self.slurm.wait_for(lambda: not self.slurm.run("squeue", "-h"), "empty queue")


def is_live(job):
    return job["state"] == "running" and job["resize_kind"] == "live"
