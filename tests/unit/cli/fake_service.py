"""A service as the command line sees it: canned answers on loopback, and a record of what was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "the-token"
NOW = time.time()


def job(job_id: str, **values: Any) -> dict[str, Any]:
    """A running job, or another one."""
    return {
        "id": job_id, "name": job_id, "state": "running", "queue": "default", "priority": "normal",
        "submitted_at": NOW - 600, "min_gpus": 1, "max_gpus": 8, "gpus": 4, "placement": {"node-a": 4},
        "generation": 2, "started_at": NOW - 500, "ended_at": None, "restarts": 1, "crashes": 0, "retries": 3,
        "rigid": False, "after": [], "detail": "", "batch_size": 1024, "local_batch": 128, "accumulation": 1,
        "learning_rate_factor": 1.5, "throughput": 2000.0, "efficiency": 0.81, "goodput": 1620.0,
        "noise_scale": 5000.0, "loss": 0.25, "epoch": 3.5, "progress": 0.42,
        "eta": {"low": NOW + 690, "high": NOW + 1350, "current": NOW + 930},
        "reason": {"code": "shrunk", "at": NOW - 60, "numbers": {}, "text": "shrunk 8→4: job-51 arrived",
                   "next_step": "pollux resize resnet --gpus 6..16"},
        "gpu_seconds": 7200.0, "reported_at": NOW, **values,
    }  # fmt: skip


PLAN = {
    "job_id": "train", "starts_now": True, "gpus": 2, "low_gpus": 1, "high_gpus": 4, "behind": [],
    "eta": {"low": NOW + 3630, "high": NOW + 7230, "current": NOW + 5430}, "text": "",
}  # fmt: skip

STATUS = {
    "version": "0.1.0", "policy": "pollux", "trigger": "events", "backend": "local", "started_at": NOW - 4000,
    "now": NOW, "revision": 17,
    "nodes": [{"id": "node-a", "gpus": 8, "gpu_type": "h100", "used": 5, "jobs": {"resnet": 4, "bert": 1},
               "schedulable": True}],
    "queues": [], "jobs_by_state": {"running": 2, "queued": 1}, "last_decision_at": NOW - 5, "decision_seconds": 0.012,
}  # fmt: skip

Answer = tuple[int, Any]


@dataclass
class FakeService:
    """Answers by (method, path); a value is a JSON answer, (status, JSON), or a function of (query, body)."""

    answers: dict[tuple[str, str], Any] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str], Any, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    home: Any = None
    job: Any = None
    error: Any = None
    plan: Any = None
    status: Any = None

    def calls(self, method: str) -> list[tuple[str, Any]]:
        """Path and body of what was asked with this method."""
        return [(path, body) for verb, path, _, body, _ in self.asked if verb == method]

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Answer | bytes:
        """What to say."""
        found = self.answers.get((method, path))
        if callable(found):
            found = found(query, body)
        if found is None:
            return 404, error("UnknownName", f"unknown job '{path}'")
        if isinstance(found, bytes):
            return found
        return found if isinstance(found, tuple) else (200, found)


def error(code: str, message: str) -> dict[str, Any]:
    """An error as the service says it."""
    return {"error": {"code": code, "message": message, "retryable": False}}


def _handler(service: FakeService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            service.asked.append((self.command, parts.path, query, body, dict(self.headers)))
            answer: Answer | bytes = (401, error("Unauthorised", "this service does not know the token"))
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                answer = service.answer(self.command, parts.path, query, body)
            status, content = (
                (200, answer) if isinstance(answer, bytes) else (answer[0], json.dumps(answer[1]).encode())
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._do()

        def do_POST(self) -> None:
            self._do()

        def do_PUT(self) -> None:
            self._do()

        def date_time_string(self, timestamp: Any = None) -> str:
            return super().date_time_string(NOW)  # so that what is left of an ETA does not depend on the test's speed

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(answers: dict[tuple[str, str], Any]) -> Iterator[FakeService]:
    """A fake service on a free port of loopback."""
    service = FakeService(answers)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(service))
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
