"""Kill -9 of the whole service at random moments: what was acknowledged is there, every job runs to its end once.

`POLLUX_FAULT_EVENTS` sets the number of kills, `POLLUX_FAULT_SEED` the seed. Run as a script, this file is the service.
Clients submit, pause, resume, resize and cancel all the time, so that kills come while requests are on their way; what
got no answer is asked again after the restart. Every replica writes a line when it starts and one when it ends, so that
two runs at a time would be seen; one job trains, and its ledger tells whether a sample was lost.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime, wait_until

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "3"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20214"))
# Not of our own names, which jobs and shims do not inherit.
MARK = "TEST_OF_SERVICE_KILLS"
TRAIN = Path(__file__).resolve().parents[2] / "examples" / "demo" / "train.py"
EPOCHS = 3
ENDED = ("succeeded", "failed", "cancelled")

JOB = """
import os, signal, sys, time
path, seconds = sys.argv[1], float(sys.argv[2])
if os.environ["RANK"] != "0":
    path = f"{path}.{os.environ['RANK']}"  # a job that was let grow has more than one replica
def say(word):
    line = f"{word} {os.environ['POLLUX_GENERATION']} {os.getpid()} {time.time()}\\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.close(descriptor)
def leave(*_):
    say("stopped")
    os._exit(0)
if os.path.exists(path) and "done" in open(path).read():
    sys.exit(0)  # told to stop in the very moment of its end, and started again
signal.signal(signal.SIGTERM, leave)
say("started")
time.sleep(seconds)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("done")
"""

SLOW = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
open(f"{sys.argv[1]}-{os.environ['RANK']}", "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


class Service:
    """The service as a process of its own, started again after each kill."""

    def __init__(self, home: Path, mark: str) -> None:
        self.home, self.mark = home, mark
        self.process: subprocess.Popen[bytes] | None = None
        self.cut_off = 0

    def start(self, warm: bool) -> None:
        environ = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.home.parent / "service.log").open("ab") as log:
            command = [sys.executable, __file__, str(self.home), "warm" if warm else "cold"]
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log()
            try:
                if json.loads((self.home / "service.json").read_text())["pid"] == self.process.pid:
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        raise OutOfTime("no service within a minute")

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def log(self) -> str:
        return (self.home.parent / "service.log").read_text()[-3000:]

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """An answer, or (0, None) where none came."""
        try:
            url = json.loads((self.home / "service.json").read_text())["url"]
            token = (self.home / "token").read_text().strip()
        except (OSError, ValueError):
            return 0, None
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
        headers = {"Authorization": f"Bearer {token}", **({"Idempotency-Key": key} if key else {})}
        try:
            connection.connect()
        except OSError:
            return 0, None
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            self.cut_off += 1
            return 0, None
        finally:
            connection.close()

    def answer(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        """The answer, asked again and again while none comes, as a client does over a restart."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            status, answer = self.ask(method, path, body, key)
            if status:
                return status, answer
            time.sleep(0.05)
        raise OutOfTime(f"{method} {path}: nobody answers\n{self.log()}")


class Clients:
    """Those who use the service while it is killed; what they find wrong is raised by `end`."""

    def __init__(self, service: Service, folder: Path, seed: int) -> None:
        self.service, self.folder, self.seed = service, folder, seed
        self.script = folder / "job.py"
        self.script.write_text(JOB)
        self.most = 3 * EVENTS
        self.short: list[str] = []
        self.cancelled: list[str] = []
        self._halt = threading.Event()
        self._pool = ThreadPoolExecutor(8)
        self._work: list[Future[None]] = []

    def begin(self) -> None:
        for number, what in enumerate((self._submits, self._submits, self._cancels, self._pauses, self._resizes)):
            self._work.append(self._pool.submit(self._repeat, what, random.Random(self.seed * 10 + number), number))

    def end(self) -> None:
        self._halt.set()
        for each in self._work:
            each.result(PATIENCE_SECONDS)
        self._pool.shutdown()

    def _repeat(self, what: Callable[[random.Random, str], None], random_: random.Random, number: int) -> None:
        count = 0
        while not self._halt.is_set():
            what(random_, f"{number}-{count}")
            count += 1
            self._halt.wait(random_.uniform(0.0, 0.15))

    def job(self, name: str, seconds: float, gpus: Any = 1) -> dict[str, Any]:
        run = [sys.executable, str(self.script), str(self.folder / f"{name}.lines"), str(seconds)]
        return {"name": name, "run": run, "gpus": gpus, "workdir": str(self.folder), "grace": "20s", "retries": 5}

    def take(self, name: str, body: dict[str, Any]) -> None:
        """Submit, once however often it is asked."""
        status, answer = self.service.answer("POST", "/v1/jobs", body, key=name)
        assert status == 201, (status, answer)
        assert answer["job"]["id"] == name, "the same key gave another job"

    def _submits(self, random_: random.Random, number: str) -> None:
        if len(self.short) < self.most:
            name = f"short-{number}"
            self.take(name, self.job(name, round(random_.uniform(0.1, 2.0), 2), random_.choice([1, "1..2"])))
            self.short.append(name)

    def _cancels(self, random_: random.Random, number: str) -> None:
        """A job without end, cancelled at some moment: it never runs again, whatever happens."""
        if len(self.cancelled) < EVENTS:
            name = f"endless-{number}"
            self.take(name, self.job(name, 3600.0))
            self._halt.wait(random_.uniform(0.0, 1.0))
            status, answer = self.service.answer("POST", f"/v1/jobs/{name}/cancel")
            # Cancelled twice: the first time it was done, and only the answer got lost.
            assert status in (200, 409), answer
            assert self.service.answer("GET", f"/v1/jobs/{name}")[1]["job"]["state"] == "cancelled"
            self.cancelled.append(name)

    def _pauses(self, random_: random.Random, number: str) -> None:
        if self.short:
            name = random_.choice(self.short)
            status, answer = self.service.answer("POST", f"/v1/jobs/{name}/pause")
            assert status in (200, 409), answer
            if status == 200:
                self._halt.wait(random_.uniform(0.0, 0.3))
                state = self.service.answer("GET", f"/v1/jobs/{name}")[1]["job"]["state"]
                assert state in ("paused", "succeeded"), f"{name} was paused, and is {state}"
            status, answer = self.service.answer("POST", f"/v1/jobs/{name}/resume")
            assert status in (200, 409), answer

    def _resizes(self, random_: random.Random, number: str) -> None:
        if self.short:
            name, high = random_.choice(self.short), random_.choice([1, 2, 3])
            status, answer = self.service.answer("POST", f"/v1/jobs/{name}/resize", {"gpus": f"1..{high}"})
            assert status in (200, 409), answer
            if status == 200:
                job = self.service.answer("GET", f"/v1/jobs/{name}")[1]["job"]
                assert job["max_gpus"] == high, job


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


def lines_of(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def problems_of(path: Path, ends: int) -> list[str]:
    """What is wrong with a job's lines: its first replica must be 'done' so often, and none run twice at once."""
    words = [line[0] for line in lines_of(path)]
    problems = [] if words.count("done") == ends else [f"{path.name}: not done {ends} times: {lines_of(path)}"]
    for each in (path, *sorted(path.parent.glob(f"{path.name}.*"))):
        problems += overlaps_of(each)
    return problems


def overlaps_of(path: Path) -> list[str]:
    """What is wrong with one replica's lines: each start must be followed by its own end."""
    problems = []
    lines = lines_of(path)
    words = [line[0] for line in lines]
    if words[::2] != ["started"] * ((len(words) + 1) // 2) or len(words) % 2:
        problems.append(f"{path.name}: runs overlap or are cut off: {lines}")
    for begin, end in zip(lines[::2], lines[1::2], strict=False):
        if begin[1:3] != end[1:3]:
            problems.append(f"{path.name}: another process ended a run: {lines}")
    return problems


def check_ledger(home: Path) -> None:
    """Every pass of the training job had each sample once."""
    receipt = json.loads((home / "receipts" / "training" / "receipt.json").read_text())
    assert len(receipt["ledger"]) == EPOCHS
    assert {entry["samples"] for entry in receipt["ledger"]} == {1437}, "a pass lost or repeated samples"
    assert len({entry["hash"] for entry in receipt["ledger"]}) == 1, "a pass had other samples than the rest"


def train(folder: Path, epochs: int = EPOCHS) -> dict[str, Any]:
    quick = ["--copies", "1", "--step-wait", "0.02", "--sample-wait", "0.0005", "--epochs", str(epochs)]
    run = [sys.executable, str(TRAIN), *quick]
    return {"name": "training", "run": run, "gpus": "1..2", "workdir": str(folder), "grace": "20s", "retries": 5}


def test_kills_at_random_moments(tmp_path):
    print(f"seed {SEED}, {EVENTS} events")
    random_ = random.Random(SEED)
    home, mark = tmp_path / "home", uuid.uuid4().hex
    service = Service(home, mark)
    clients = Clients(service, tmp_path, SEED)
    service.start(warm=True)
    try:
        clients.take("training", train(tmp_path))
        clients.begin()
        for number in range(EVENTS):
            time.sleep(random_.choice([random_.uniform(0.0, 0.5), random_.uniform(0.5, 2.5)]))
            service.kill()
            service.start(warm=number % 3 == 2)
        clients.end()
        names = ["training", *clients.short, *clients.cancelled]
        states = wait_for_all(service, names)
        wanted = {name: "cancelled" if name in clients.cancelled else "succeeded" for name in names}
        assert states == wanted, service.log()
        print(f"{service.cut_off} requests were cut off, {len(names)} jobs")
        problems = [problem for name in clients.short for problem in problems_of(tmp_path / f"{name}.lines", 1)]
        problems += [problem for name in clients.cancelled for problem in problems_of(tmp_path / f"{name}.lines", 0)]
        assert problems == []
        check_ledger(home)
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(PATIENCE_SECONDS) == 0, service.log()
        assert not (home / "service.json").exists()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while processes_with(mark) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert processes_with(mark) == []
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        if service.process is not None:
            service.process.wait(PATIENCE_SECONDS)


def replica_of(job: str, home: Path) -> int:
    """The process of a job's first replica; 0 where there is none."""
    wanted = {f"POLLUX_OUTPUT_DIR={home / 'receipts' / job}".encode(), b"RANK=0"}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted <= {*(entry / "environ").read_bytes().split(b"\0")}:
                return int(entry.name)
        except OSError:
            continue
    return 0


def test_a_kill_while_an_order_waits(tmp_path):
    """The next service has the job change in its living processes, as was decided, and does not restart it."""
    home, mark = tmp_path / "home", uuid.uuid4().hex
    service = Service(home, mark)
    clients = Clients(service, tmp_path, SEED)
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    service.start(warm=False)
    try:
        holder = clients.job("holder", 0.0, 2) | {"run": [sys.executable, str(slow), str(tmp_path / "leave")]}
        clients.take("holder", {**holder, "grace": "10m"})
        # One decision about both might have it wait.
        wait_until("replicas that hold on", lambda: len(list(tmp_path.glob("leave-*"))) == 2)
        clients.take("training", {**train(tmp_path, epochs=500), "gpus": "1..3"})
        wait_for(service, "training", lambda job: job["state"] == "running" and job["reported_at"] is not None)
        first = replica_of("training", home)
        assert first
        # The place of the holder is given to the job that trains, and is not free yet.
        assert service.answer("POST", "/v1/jobs/holder/cancel")[0] == 200
        assert service.answer("POST", "/v1/jobs/training/resize", {"gpus": "3..3"})[0] == 200
        waiting = wait_for(service, "training", lambda job: job["state"] == "resizing" and job["gpus"] == 3)
        service.kill()
        service.start(warm=False)
        (tmp_path / "leave").touch()
        moved = wait_for(service, "training", lambda job: job["state"] == "running")
        assert (moved["generation"], moved["gpus"]) == (waiting["generation"], 3), service.log()
        assert replica_of("training", home) == first, "it was restarted"
        assert service.answer("POST", "/v1/jobs/training/cancel")[0] == 200
        assert wait_for_all(service, ["training"])["training"] == "cancelled"
        service.process.send_signal(signal.SIGTERM)
        service.process.wait(PATIENCE_SECONDS)
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        if service.process is not None:
            service.process.wait(PATIENCE_SECONDS)


def wait_for(service: Service, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The job as it is once that is so."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        job: dict[str, Any] = service.answer("GET", f"/v1/jobs/{name}")[1]["job"]
        if is_so(job):
            return job
        time.sleep(0.1)
    raise OutOfTime(f"{job}\n{service.log()}")


def wait_for_all(service: Service, names: list[str]) -> dict[str, str]:
    """The states of all jobs once these have ended. One that never does is a failure, and not tried again."""
    states: dict[str, str] = {}
    until = time.monotonic() + 300.0 + 15.0 * len(names)
    while time.monotonic() < until:
        status, answer = service.ask("GET", "/v1/jobs?limit=1000")
        assert status == 200
        states = {job["id"]: job["state"] for job in answer["jobs"]}
        if set(names) <= set(states) and all(states[name] in ENDED for name in names):
            return states
        time.sleep(0.2)
    still = {name: states.get(name) for name in names if states.get(name) not in ENDED}
    raise AssertionError(f"these jobs did not end: {still}\n{service.log()}")


def test_a_job_that_never_ends_is_a_failure_and_not_tried_again(tmp_path, monkeypatch):
    import pytest  # not at the top, since the service has no use for it

    service = Service(tmp_path / "home", "")
    (tmp_path / "service.log").touch()
    jobs = [{"id": "a", "state": "succeeded"}, {"id": "b", "state": "running"}]
    monkeypatch.setattr(service, "ask", lambda *_: (200, {"jobs": jobs}))
    assert wait_for_all(service, ["a"])["a"] == "succeeded"
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(AssertionError, match=r"{'b': 'running'}") as caught:
        wait_for_all(service, ["a", "b"])
    assert not isinstance(caught.value, OutOfTime)


def serve_here(home: str, warm: bool) -> None:
    from pollux.service import ServiceSettings, serve

    serve(
        ServiceSettings(
            home=Path(home),
            port=0,
            backend_options={"slots": 3, "warm": warm},
            min_gap_seconds=0.3,
            snapshot_every_facts=25,
        )
    )


if __name__ == "__main__":
    serve_here(sys.argv[1], sys.argv[2] == "warm")
