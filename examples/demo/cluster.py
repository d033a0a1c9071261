"""A service of its own for a demonstration: started in a folder, given jobs as time goes by, watched, and stopped.

Everything goes through the command `pollux` and the REST API, as a user's own script would.
"""

import json
import math
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The service is on this machine: whatever proxy its user has for others is not asked.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class OutOfTime(Exception):
    """Jobs did not end in the time that they were given; the text says which."""


@dataclass(frozen=True)
class Request:
    """A job of the demonstration: when it comes, how long it trains, and how many slots its user would ask for."""

    name: str
    at: float
    epochs: int
    fixed_slots: int
    seed: int = 0
    script: Path = HERE / "train.py"


# A long job first, short ones after. Its users' own sizes are what people choose: a round number that is free now.
WORKLOAD = (
    Request("long", 0.0, 8, 2, seed=1),
    Request("short-a", 6.0, 2, 2, seed=2),
    Request("short-b", 12.0, 2, 2, seed=3),
    Request("short-c", 18.0, 2, 2, seed=4),
    Request("short-d", 24.0, 2, 2, seed=5),
)
COPIES = 4


@dataclass
class Watched:
    """What was seen of one job: (seconds, slots, batch, efficiency) over time, and how it ended."""

    submitted: float = 0.0
    ended: float | None = None
    state: str = "queued"
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)
    accuracy: float | None = None

    @property
    def completion_seconds(self) -> float:
        """From its submission to its end."""
        return (self.ended or float("nan")) - self.submitted


class Service:
    """`pollux up` on CPU slots in a folder of its own; use it in a `with` block."""

    def __init__(self, folder: Path, policy: str, slots: int) -> None:
        self.folder, self.policy, self.slots = folder, policy, slots
        self.environment = {**os.environ, "POLLUX_HOME": str(folder)}

    def __enter__(self) -> "Service":
        self.up("0")
        return self

    def up(self, port: str) -> None:
        """Start it; where it is and its token are known afterwards."""
        self.pollux("up", "--detach", "--policy", self.policy, "--slots", str(self.slots), "--port", port)
        self.url = json.loads((self.folder / "service.json").read_text())["url"]
        self.token = (self.folder / "token").read_text().strip()

    def switch(self, policy: str) -> None:
        """Go on under another policy: at the same address, with the same token and everything that it knows."""
        port = self.url.rsplit(":", 1)[1].strip("/")
        self.pollux("down")
        self.policy = policy
        self.up(port)

    def __exit__(self, *error: object) -> None:
        self.pollux("down")

    def pollux(self, *arguments: str) -> str:
        """Run the command line against this service."""
        command = [sys.executable, "-m", "pollux", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise SystemExit(f"pollux {' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def get(self, path: str) -> dict:
        """An answer of the REST API."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})
        with _DIRECTLY(request, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: dict) -> dict:
        """Send something to the REST API."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with _DIRECTLY(request, timeout=30) as response:
            return json.load(response)

    def submit(self, job: Request, adaptive: bool, prefix: str = "") -> None:
        """The same training, elastic with a ceiling for its batch, or as its user would fix it."""
        command = [sys.executable, str(job.script), "--epochs", str(job.epochs), "--seed", str(job.seed)]
        command += ["--copies", str(COPIES)]
        if adaptive:
            command += ["--max-batch-size", "512"]
        gpus = f"1..{self.slots}" if adaptive else job.fixed_slots
        name = f"{prefix}{job.name}"
        workdir = str(job.script.parent)
        self.post("/v1/jobs", {"name": name, "run": command, "gpus": gpus, "workdir": workdir, "grace": "20s"})


def run(
    service: Service,
    workload: tuple[Request, ...],
    seen: dict[str, Watched],
    show=None,
    ends_at: float = math.inf,
    prefix: str = "",
) -> None:
    """Submit the jobs at their times and watch until all have ended; `show(seconds, statuses)` is called on the way.

    What is seen of each job goes into `seen`, so that it is there whatever ends this. With a `prefix` before their
    names the jobs are told from others that the service knows. OutOfTime at the monotonic time `ends_at`.
    """
    adaptive = service.policy != "fifo"
    began = time.monotonic()
    waiting = sorted(workload, key=lambda job: job.at)
    while waiting or any(job.ended is None for job in seen.values()):
        now = time.monotonic() - began
        if time.monotonic() > ends_at:
            left = [f"{prefix}{job.name} not submitted" for job in waiting]
            left += [f"{prefix}{name} {job.state}" for name, job in seen.items() if job.ended is None]
            raise OutOfTime(", ".join(left))
        while waiting and waiting[0].at <= now:
            job = waiting.pop(0)
            service.submit(job, adaptive, prefix)
            seen[job.name] = Watched(submitted=time.monotonic() - began)
        known = {f"{prefix}{name}": job for name, job in seen.items()}
        statuses = [status for status in service.get("/v1/jobs?limit=100")["jobs"] if status["id"] in known]
        now = time.monotonic() - began
        for status in statuses:
            note(known[status["id"]], status, now)
        if show is not None:
            show(now, statuses)
        time.sleep(0.5)
    for name, job in seen.items():
        rows = service.get(f"/v1/jobs/{prefix}{name}/series?kind=report&limit=5")["rows"]
        job.accuracy = rows[-1]["values"].get("metrics", {}).get("accuracy") if rows else None


def note(job: Watched, status: dict, now: float) -> None:
    """Enter what the service says of a job now."""
    if job.ended is not None:
        return
    job.state = status["state"]
    job.samples.append((now, status["gpus"], status["batch_size"] or 0, status["efficiency"] or 1.0))
    if status["state"] in ("succeeded", "failed", "cancelled"):
        job.ended = job.submitted + status["ended_at"] - status["submitted_at"]
