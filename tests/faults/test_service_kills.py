"""Kill -9 of the whole service at random moments: what was acknowledged is there, every job runs to its end once.

`POLLUX_FAULT_EVENTS` sets the number of kills, `POLLUX_FAULT_SEED` the seed. Run as a script, this file is the service;
jobs write a line when they start and one when they end, so that two runs at a time would be seen.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "6"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20214"))
MARK = "POLLUX_TEST_MARK"

JOB = """
import os, signal, sys, time
path, seconds = sys.argv[1], float(sys.argv[2])
def say(word):
    line = f"{word} {os.environ['POLLUX_GENERATION']} {os.getpid()} {time.time()}\\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.close(descriptor)
def leave(*_):
    say("stopped")
    os._exit(3)
signal.signal(signal.SIGTERM, leave)
say("started")
time.sleep(seconds)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("done")
"""


class Service:
    """The service as a process of its own, started again after each kill."""

    def __init__(self, home: Path, mark: str) -> None:
        self.home, self.mark = home, mark
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with (self.home.parent / "service.log").open("ab") as log:
            command = [sys.executable, __file__, str(self.home)]
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            assert self.process.poll() is None, (self.home.parent / "service.log").read_text()[-3000:]
            try:
                if json.loads((self.home / "service.json").read_text())["pid"] == self.process.pid:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        raise AssertionError("the service did not start within a minute")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """An answer, or (0, None) where none came."""
        url = json.loads((self.home / "service.json").read_text())["url"]
        token = (self.home / "token").read_text().strip()
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        headers = {"Authorization": f"Bearer {token}", **({"Idempotency-Key": key} if key else {})}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()


def processes_with(mark: str) -> list[int]:
    """Pids whose environment has the mark, from the system's own books."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def problems_of(path: Path) -> list[str]:
    """What is wrong with one job's lines: each start must be followed by its own end, and one end must be 'done'."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    problems = [] if sum(line[0] == "done" for line in lines) == 1 else [f"{path.name}: not done exactly once: {lines}"]
    words = [line[0] for line in lines]
    if words[::2] != ["started"] * ((len(words) + 1) // 2) or len(words) % 2:
        problems.append(f"{path.name}: runs overlap or are cut off: {lines}")
    for begin, end in zip(lines[::2], lines[1::2], strict=False):
        if begin[1:3] != end[1:3]:
            problems.append(f"{path.name}: another process ended a run: {lines}")
    return problems


def test_kills_at_random_moments(tmp_path):
    print(f"seed {SEED}, {EVENTS} events")
    random_ = random.Random(SEED)
    home, mark = tmp_path / "home", uuid.uuid4().hex
    script = tmp_path / "job.py"
    script.write_text(JOB)
    service = Service(home, mark)
    acknowledged: list[str] = []
    sent = 0
    service.start()
    try:
        for _ in range(EVENTS):
            until = time.monotonic() + random_.choice([random_.uniform(0.0, 0.5), random_.uniform(0.5, 2.5)])
            while time.monotonic() < until:
                if len(acknowledged) < 3 * EVENTS:
                    name = f"job-{sent}"
                    body = {
                        "name": name, "run": [sys.executable, str(script), str(tmp_path / f"{name}.lines"),
                        str(round(random_.uniform(0.1, 2.0), 2))], "gpus": random_.choice([1, "1..2"]),
                        "workdir": str(tmp_path), "grace": "20s", "retries": 5,
                    }  # fmt: skip
                    status, _ = service.ask("POST", "/v1/jobs", body, key=name)
                    assert status == 201, status
                    acknowledged.append(name)
                    sent += 1
                time.sleep(random_.uniform(0.0, 0.15))
            service.kill()
            service.start()
        states = wait_for_all(service, acknowledged)
        assert states == dict.fromkeys(acknowledged, "succeeded")
        problems = [problem for name in acknowledged for problem in problems_of(tmp_path / f"{name}.lines")]
        assert problems == []
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(60) == 0, (tmp_path / "service.log").read_text()[-3000:]
        assert not (home / "service.json").exists()
        deadline = time.monotonic() + 90.0
        while processes_with(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes_with(mark) == []
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def wait_for_all(service: Service, names: list[str]) -> dict[str, str]:
    states: dict[str, str] = {}
    until = time.monotonic() + 60.0 + 10.0 * len(names)
    while time.monotonic() < until:
        status, answer = service.ask("GET", "/v1/jobs?limit=1000")
        assert status == 200
        states = {job["id"]: job["state"] for job in answer["jobs"]}
        if set(names) <= set(states) and all(states[name] in ("succeeded", "failed", "cancelled") for name in names):
            break
        time.sleep(0.2)
    return states


def serve_here(home: str) -> None:
    from pollux.service import ServiceSettings, serve

    serve(
        ServiceSettings(
            home=Path(home),
            port=0,
            backend_options={"slots": 3, "warm": False},
            min_gap_seconds=0.3,
            snapshot_every_facts=25,
        )
    )


if __name__ == "__main__":
    serve_here(sys.argv[1])
