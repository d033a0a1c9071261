"""The whole API driven by random sequences: never a mistake of ours, refusals change nothing, no node is oversubscribed
and a restart shows the same."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.service import SAMPLE_MODEL, FakeBackend, ManualClock, sample_report
from pollux.wire.codec import encode

NAMES = st.sampled_from(["a", "b", "c", "a-2", "nobody", "Not A Name", "../x"])
GPUS = st.sampled_from([1, 2, 4, 9, "1..4", "2..3", "0..2", "4..1", [1, 2], True, None, "x", 2.0])
JOBS = st.sampled_from(["a", "b", "c"])
GOOD_GPUS = st.sampled_from([1, 2, "1..4", "2..3"])
OUTCOMES = st.sampled_from(["succeeded", "crashed", "out-of-memory", "stopped", "lost"])


class Api(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["pollux", "fifo", "las"]), gpus=GOOD_GPUS)
    def open(self, policy: str, gpus: Any) -> None:
        self.home = Path(tempfile.gettempdir())
        self.policy = policy
        self.clock = ManualClock(1000.0)
        self.backend = FakeBackend([Node("n0", 4, "cpu"), Node("n1", 2, "cpu")], self.clock)
        self.store, self.telemetry, self.tokens = MemoryStore(), MemoryTelemetry(), Tokens.random()
        self.begin()
        self.submit_well("a", gpus)

    def begin(self) -> None:
        home = ServiceSettings(home=self.home, snapshot_every_facts=7)
        policy = policies.create(self.policy)
        self.engine = Engine(policy, self.backend, self.store, self.telemetry, home, self.clock, self.tokens)
        self.engine.start()
        self.engine.settle()
        self.client = TestClient(create_app(self.engine, self.tokens), base_url="http://127.0.0.1")

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.stop("keep")

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> Any:
        self.engine.settle()
        before = self.store.revision, self.engine.jobs()
        header = {"authorization": f"Bearer {token or self.tokens.operator}"}
        answer = self.client.request(method, path, json=body, headers=header)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"code", "message", "retryable"}
            self.engine.settle()
            assert (self.store.revision, self.engine.jobs()) == before
        self.engine.settle()
        return answer

    @rule(name=JOBS, gpus=GOOD_GPUS)
    def submit_well(self, name: str, gpus: Any) -> None:
        body = {"name": name, "run": "sleep 1", "workdir": str(self.home), "gpus": gpus, "retries": 2}
        assert self.ask("POST", "/v1/jobs", body).status_code in (201, 409)

    @rule(name=NAMES, gpus=GPUS, after=st.lists(NAMES, max_size=2), retries=st.sampled_from([0, 1, -1]))
    def submit(self, name: str, gpus: Any, after: list[str], retries: int) -> None:
        body = {"name": name, "run": "sleep 1", "workdir": str(self.home), "retries": retries}
        body |= {} if gpus is None else {"gpus": gpus}
        self.ask("POST", "/v1/plan", {**body, "after": after})
        answer = self.ask("POST", "/v1/jobs", {**body, "after": after})
        if answer.status_code == 201:
            assert answer.json()["job"]["id"].startswith(name)

    @rule(name=JOBS | NAMES, what=st.sampled_from(["cancel", "pause", "resume"]))
    def steer(self, name: str, what: str) -> None:
        self.ask("POST", f"/v1/jobs/{name}/{what}")

    @rule(name=JOBS | NAMES, gpus=GPUS)
    def resize(self, name: str, gpus: Any) -> None:
        self.ask("POST", f"/v1/jobs/{name}/resize", {"gpus": gpus})

    @rule(name=JOBS | NAMES, generation=st.integers(-1, 6), progress=st.floats(-1, 2000), own=st.booleans())
    def report(self, name: str, generation: int, progress: float, own: bool) -> None:
        body = encode(sample_report(generation, progress, model=SAMPLE_MODEL))
        self.ask("POST", f"/v1/jobs/{name}/reports", body, self.tokens.for_job(name if own else "b"))

    @rule(name=NAMES, weight=st.sampled_from([0.5, 2, 0, -1, "1"]), quota=st.sampled_from([None, 0, 3, -1]))
    def queue(self, name: str, weight: Any, quota: int | None) -> None:
        self.ask("PUT", f"/v1/queues/{name}", {"weight": weight, "gpu_quota": quota})

    @rule(
        path=st.sampled_from(["status", "cluster", "queues", "eta", "jobs?active=true", "policies", "jobs/a/explain"])
    )
    def look(self, path: str) -> None:
        self.ask("GET", f"/v1/{path}")

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.engine.poke()
        self.engine.settle()

    @rule(outcome=OUTCOMES, first=st.booleans())
    def replicas_end(self, outcome: Any, first: bool) -> None:
        alive = [entry.job_id for entry in self.backend.running() if entry.state != "ended"]
        if alive:
            self.backend.ended(alive[0 if first else -1], outcome)
            self.engine.settle()

    @rule()
    def replicas_start(self) -> None:
        for entry in self.backend.running():
            if entry.state == "running":
                self.backend.started(entry.job_id)
        self.engine.settle()

    @rule()
    def restart(self) -> None:
        self.engine.settle()
        before = [(job.id, job.state, job.gpus, job.generation, job.crashes) for job in self.engine.jobs()]
        self.engine.stop("keep")
        self.begin()
        after = [(job.id, job.state, job.gpus, job.generation, job.crashes) for job in self.engine.jobs()]
        assert after == before

    @invariant()
    def nothing_is_oversubscribed(self) -> None:
        if hasattr(self, "engine"):
            self.engine.settle()
            for node in self.engine.status().nodes:
                assert node.used <= node.gpus


Api.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestApi = Api.TestCase
