"""The real thing: a service in a process of its own, spoken to over a socket."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime, wait_until

SERVE = """
import sys
from pathlib import Path
from pollux.core.errors import PolluxError
from pollux.service import ServiceSettings, serve
try:
    options = {"slots": 2, "warm": False}
    serve(ServiceSettings(home=Path(sys.argv[1]), port=int(sys.argv[2]), backend_options=options, min_gap_seconds=0.2))
except PolluxError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Running:
    def __init__(self, home: Path, port: int = 0) -> None:
        self.home = home
        command = [sys.executable, "-c", SERVE, str(home), str(port)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # One that is refused ends instead.
        try:
            wait_until("service", lambda: (home / "service.json").exists() or self.process.poll() is not None)
        except OutOfTime:
            self.process.kill()
            raise

    @property
    def address(self) -> str:
        url: str = json.loads((self.home / "service.json").read_text())["url"]
        return url.removeprefix("http://")

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_SECONDS)
        token = (self.home / "token").read_text().strip()
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Authorization": f"Bearer {token}", **headers})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def state(self, job: str) -> str:
        state: str = self.ask("GET", f"/v1/jobs/{job}")[1]["job"]["state"]
        return state

    def wait_for(self, job: str, *states: str) -> str:
        return wait_until(
            f"{states}", lambda: state if (state := self.state(job)) in states else "", PATIENCE_SECONDS, 0.05
        )

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(number)
        _, said = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, said


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "home")
    yield running
    running.end()


def job(tmp_path: Path, code: str, **keys: Any) -> dict[str, Any]:
    return {"run": [sys.executable, "-c", code], "workdir": str(tmp_path), "name": "j", "grace": "5s", **keys}


def test_a_job_runs_through_and_the_service_ends(service, tmp_path):
    status, answer = service.ask("POST", "/v1/jobs", job(tmp_path, "print('hello from a job')"))
    assert status == 201, answer
    assert service.wait_for("j", "succeeded", "failed") == "succeeded"
    assert "hello from a job" in service.ask("GET", "/v1/jobs/j/logs")[1]["text"]
    assert service.end() == (0, "")
    assert not (service.home / "service.json").exists()


def test_a_job_that_is_stopped_with_the_service_goes_on_with_the_next(service, tmp_path):
    code = (
        "import os, sys, time, pathlib, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\n"
        "p = pathlib.Path('runs'); p.write_text((p.read_text() if p.exists() else '') + 'x')\n"
        "time.sleep(0 if len(p.read_text()) > 1 else 3600)\n"
    )
    service.ask("POST", "/v1/jobs", job(tmp_path, code, retries=0))
    wait_until("start", (tmp_path / "runs").exists)
    assert service.ask("POST", "/v1/shutdown", {"jobs": "stop"})[0] == 202
    assert service.end()[0] == 0
    again = Running(service.home)
    try:
        assert again.wait_for("j", "succeeded", "failed") == "succeeded"
        assert (tmp_path / "runs").read_text() == "xx"
        assert again.ask("GET", "/v1/jobs/j")[1]["job"]["crashes"] == 0
    finally:
        again.end()


def test_a_second_service_and_a_port_in_use_are_refused(service, tmp_path):
    same_home = Running(tmp_path / "home")
    same_home.process.wait(PATIENCE_SECONDS)
    code, said = same_home.end()
    assert code == 2
    assert said.startswith(f"a service runs here already, at http://{service.address} as process {service.process.pid}")
    assert len(said.splitlines()) == 1
    port = int(service.address.rsplit(":", 1)[1])
    same_port = Running(tmp_path / "other", port)
    code, said = same_port.end()
    assert code == 2
    assert "--port" in said
    assert len(said.splitlines()) == 1
    assert service.ask("GET", "/healthz")[0] == 200


LINGERS = """
import pathlib, signal, time
def leave(*_):
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    raise SystemExit(1)
signal.signal(signal.SIGTERM, leave)
pathlib.Path("started").touch()
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["request", "signal"])
def test_while_jobs_stop_the_service_answers_and_takes_no_new_ones(service, tmp_path, how):
    service.ask("POST", "/v1/jobs", job(tmp_path, LINGERS, grace="30s"))
    wait_until("start", (tmp_path / "started").exists)
    assert service.ask("GET", "/readyz")[0] == 200
    if how == "request":
        assert service.ask("POST", "/v1/shutdown", {}) == (202, {"status": "stopping", "seconds": 45.0})
        assert service.ask("POST", "/v1/shutdown", {})[0] == 202, "once more changes nothing"
    else:
        service.process.send_signal(signal.SIGTERM)
    wait_until("stop", lambda: service.ask("GET", "/readyz")[0] != 200)
    assert service.ask("GET", "/readyz")[0] == 503
    assert service.ask("GET", "/healthz")[0] == 200
    assert service.state("j") == "running"
    status, refused = service.ask("POST", "/v1/jobs", job(tmp_path, "pass", name="k"))
    assert (status, refused["error"]["code"], refused["error"]["retryable"]) == (503, "Unreachable", True)
    assert "stopping" in refused["error"]["message"]
    assert service.process.poll() is None
    (tmp_path / "go").touch()
    assert service.process.wait(PATIENCE_SECONDS) == 0


def test_a_service_that_may_choose_its_port_takes_the_one_before(service):
    address = service.address
    assert service.end()[0] == 0
    again = Running(service.home)
    try:
        assert again.address == address
    finally:
        again.end()
    with socket.create_server(("127.0.0.1", int(address.rsplit(":", 1)[1]))):
        other = Running(service.home)
        try:
            assert other.address != address
        finally:
            other.end()


def test_the_stream_tells_what_happens(service, tmp_path):
    connection = http.client.HTTPConnection(service.address, timeout=PATIENCE_SECONDS)
    token = (service.home / "token").read_text().strip()
    connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {token}"})
    stream = connection.getresponse()
    assert stream.getheader("content-type", "").startswith("text/event-stream")
    assert stream.readline() == b": hello\n"
    service.ask("POST", "/v1/jobs", job(tmp_path, "pass"))
    kinds = []
    while "ended" not in kinds:
        line = stream.readline().decode()
        if line.startswith("event: "):
            kinds.append(line.removeprefix("event: ").strip())
    assert kinds[0] == "submitted"
    assert "decision" in kinds
    # A listener that is still there does not keep the service from ending.
    assert service.end()[0] == 0
    connection.close()


def test_history_is_a_stream_of_lines(service, tmp_path):
    service.ask("POST", "/v1/jobs", job(tmp_path, "pass"))
    service.wait_for("j", "succeeded")
    connection = http.client.HTTPConnection(service.address, timeout=PATIENCE_SECONDS)
    token = (service.home / "token").read_text().strip()
    connection.request("GET", "/v1/history", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    lines = [json.loads(line) for line in answer.read().splitlines()]
    connection.close()
    assert lines[0]["format"] == "pollux-history"
    assert len(lines) > 3
