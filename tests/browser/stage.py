"""A real service over HTTP whose backend is a fake one: what the browser tests look at, and what they make happen."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import uvicorn

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, Tokens
from pollux.service.server.app import create_app
from pollux.service.server.serve import listen
from pollux.service.settings.clock import SystemClock
from pollux.store import open_store, open_telemetry
from pollux.testing.servers.service import SAMPLE_MODEL, FakeBackend, ManualClock, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until
from pollux.wire.job import JobRequest
from pollux.wire.report import NoiseReport

NODES = (Node("node-a", 4, "a100"), Node("node-b", 4, "a100"), Node("node-c", 2, "t4"))


class Stage:
    """An engine and its web server in threads of this process. `down` and `up` again is a restart of the service."""

    def __init__(self, home: Path, nodes: tuple[Node, ...] = NODES) -> None:
        self.home = home
        self.clock = SystemClock()
        self.backend = FakeBackend(nodes, cast(ManualClock, self.clock), by_itself=True)
        self.backend.log_text = "step 1 loss 2.30\nstep 2 loss 2.25\n"
        self.tokens = Tokens("operator-token-of-the-stage", "secret", "viewer-token-of-the-stage")
        self.port = 0
        self.up()

    def up(self) -> None:
        """Start on the files of the home, and on the port of last time."""
        listener = listen("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = ServiceSettings(home=self.home, url=self.url, min_gap_seconds=0.1)
        store = open_store(self.home / "store.db")
        telemetry = open_telemetry(self.home / "telemetry.db")
        policy = policies.create("pollux")
        self.engine = Engine(policy, self.backend, store, telemetry, settings, self.clock, self.tokens)
        self.engine.start()
        config = uvicorn.Config(
            create_app(self.engine, self.tokens),
            log_config=None,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)

    def down(self) -> None:
        """Stop answering; jobs go on."""
        self._server.should_exit = True
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self.engine.stop("keep")

    def submit(self, name: str, low: int = 1, high: int = 4, **fields: Any) -> str:
        """A job for so many GPUs, settled in what the policy gives it at once."""
        request = JobRequest(
            name=name, run=("sleep", "1"), min_gpus=low, max_gpus=high, workdir=str(self.home), **fields
        )
        status, _ = result_of(self.engine.submit(request))
        return status.id

    def wait_state(self, job_id: str, *states: str) -> None:
        wait_for(lambda: self.engine.job(job_id).state in states)

    def report(self, job_id: str, progress: float = 100.0, **fields: Any) -> None:
        """What its agent would report for what it holds now, with a model."""
        job = self.engine.job(job_id)
        given: dict[str, Any] = {
            "num_replicas": max(job.gpus, 1), "num_nodes": max(len(job.placement), 1), "model": SAMPLE_MODEL,
            "noise": NoiseReport(400.0, 300.0, 560.0, 200), "efficiency": 0.8, "step_seconds": 0.21, "loss": 1.5,
        }  # fmt: skip
        result_of(self.engine.report(job_id, sample_report(job.generation, progress, **{**given, **fields})))

    def train(self, job_id: str, reports: int = 12) -> None:
        """Several reports in a row, as of a job that learns."""
        for index in range(reports):
            done = (index + 1) / reports
            self.report(
                job_id, progress=700.0 * done, step=20 * (index + 1), samples=int(900 * done), epoch=done,
                loss=2.3 * math.exp(-1.5 * done) + 0.05 * math.sin(9 * done), efficiency=0.95 - 0.2 * done,
                throughput=60.0 + 20 * done, goodput=55.0 + 10 * done, batch_size=128 * 2 ** (index // 5),
                local_batch=64 * 2 ** (index // 5), learning_rate_factor=1.0 + done, step_seconds=0.2 + 0.02 * done,
                noise=NoiseReport(200 + 400 * done, 150 + 300 * done, 260 + 560 * done, 50 * (index + 1)),
                metrics={"accuracy": 0.3 + 0.5 * done},
            )  # fmt: skip


def wait_for(what: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Until it is true; fails after a while."""
    wait_until("change", what, seconds)
