"""The whole API driven by random sequences: never a mistake of ours, refusals change nothing, no node is oversubscribed
and a restart shows the same.

`POLLUX_FAULT_EVENTS` sets the number of sequences, `POLLUX_FAULT_SEED` the seed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from starlette.testclient import TestClient

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.service.http.operations import Operation
from pollux.service.http.uploads import Packages
from pollux.service.replay.replays import Replays
from pollux.service.server.app import operations
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import SAMPLE_MODEL, FakeBackend, ManualClock, result_of, sample_report
from pollux.wire.codec import encode

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "40"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20214"))
OPERATIONS = operations()
NAMES = st.sampled_from(["a", "b", "c", "a-2", "nobody", "Not A Name", "../x"])
GPUS = st.sampled_from([1, 2, 4, 9, "1..4", "2..3", "0..2", "4..1", [1, 2], True, None, "x", 2.0])
JOBS = st.sampled_from(["a", "b", "c"])
GOOD_GPUS = st.sampled_from([1, 2, "1..4", "2..3"])
PIECE = {"digest": "0" * 64, "size": 3, "offset": 0, "data": "AAAA"}
# Bodies by path, right ones and wrong ones; operations that are not here take none.
BODIES: dict[str, list[Any]] = {
    "/v1/jobs": [{"name": "d", "run": "sleep 1", "workdir": "/", "gpus": 1}, {}, [], None],
    "/v1/plan": [{"name": "d", "run": "sleep 1", "workdir": "/", "gpus": "1..3"}, {"name": "d"}, 3, None],
    "/v1/jobs/{job_id}/resize": [{"gpus": 2}, {"gpus": "1..4"}, {"gpus": 0}, {}, None],
    "/v1/jobs/{job_id}/reports": [encode(sample_report(1, 10.0)), {"generation": 1}, {}, None],
    "/v1/queues/{queue}": [{"weight": 2}, {"gpu_quota": 3}, {"weight": "much"}, None],
    "/v1/nodes/{node}/set-aside": [{"why": "its fan is broken"}, {}, {"why": 3}, None],
    "/v1/shutdown": [{"jobs": "keep"}, {}, {"jobs": "maybe"}, None],
    "/v1/packages": [PIECE, {**PIECE, "offset": 9}, {**PIECE, "data": "?"}, None],
    "/v1/session": [{"token": "wrong"}, {"token": 3}, {}, None],
    "/v1/whatif": [{}, {"policies": ["fifo"]}, {"policies": ["none"]}, {"nodes": ["4x8"]}, None],
}
QUERIES: dict[str, list[Any]] = {
    "state": ["running", "nothing"],
    "queue": ["default", "??"],
    "active": ["true", "maybe"],
    "limit": [1, 100, 0, -1, "x"],
    "after": ["a", "nobody", ""],
    "replica": [0, 7, -1],
    "offset": [0, -5, 10**9, "x"],
    "kind": ["report", "other"],
    "since": [0, 1000.5, -1, "x"],
    "until": [0, 2000, 1e300],
    "follow": ["false"],  # a stream that is followed has no end
}
OUTCOMES = st.sampled_from(["succeeded", "crashed", "out-of-memory", "stopped", "lost"])


class Api(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["pollux", "fifo", "las"]), gpus=GOOD_GPUS)
    def open(self, policy: str, gpus: Any) -> None:
        self.home = Path(tempfile.gettempdir())
        self.packages = tempfile.TemporaryDirectory(prefix="pollux-packages-")
        self.replays = ["nobody"]
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
        self.engine.loop.wait_until_idle()
        app = create_app(self.engine, self.tokens)
        # What a replay does is not what is tested here: its process ends at once.
        app._app.state.replays = Replays(list, ("false",))  # type: ignore[attr-defined]
        app._app.state.packages = Packages(Path(self.packages.name))  # type: ignore[attr-defined]
        self.client = TestClient(app, base_url="http://127.0.0.1")

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.stop("keep")
            self.packages.cleanup()

    def ask(self, method: str, path: str, body: Any = None, token: str = "") -> Any:
        self.engine.loop.wait_until_idle()
        before = self.store.revision, self.engine.jobs()
        header = {"authorization": f"Bearer {token or self.tokens.operator}"}
        answer = self.client.request(method, path, json=body, headers=header)
        assert answer.status_code < 500, f"{method} {path}: {answer.text}"
        if method == "GET":
            self.engine.loop.wait_until_idle()
            assert (self.store.revision, self.engine.jobs()) == before, f"{method} {path} changed something"
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"code", "message", "retryable"}
            self.engine.loop.wait_until_idle()
            assert (self.store.revision, self.engine.jobs()) == before
        self.engine.loop.wait_until_idle()
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

    @rule(operations=st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=5), name=JOBS | NAMES, data=st.data())
    def anything(self, operations: list[Operation], name: str, data: st.DataObject) -> None:
        for operation in operations:
            body = data.draw(st.sampled_from(BODIES.get(operation.path, [None])))
            query = {
                param.name: data.draw(st.sampled_from(QUERIES[param.name]))
                for param in operation.params
                if param.name == "follow" or data.draw(st.booleans())
            }
            self.do(operation, name, body if operation.takes is not None else None, query)

    def do(self, operation: Operation, name: str, body: Any, query: dict[str, Any]) -> Any:
        """Request for one operation, of the job, queue or replay that its path names."""
        path = operation.path.format(job_id=name, queue=name, node=name, replay_id=self.replays[-1])
        text = "&".join(f"{key}={value}" for key, value in query.items())
        answer = self.ask(operation.method, f"{path}?{text}" if text else path, body)
        if operation.name == "begin_replay" and answer.status_code == 202:
            self.replays.append(answer.json()["id"])
        return answer

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.clock.set(self.clock.time + seconds, self.engine)
        self.engine.loop.wait_until_idle()

    @rule(outcome=OUTCOMES, first=st.booleans())
    def replicas_end(self, outcome: Any, first: bool) -> None:
        alive = [entry.job_id for entry in self.backend.running() if entry.state != "ended"]
        if alive:
            self.backend.ended(alive[0 if first else -1], outcome)
            self.engine.loop.wait_until_idle()

    @rule()
    def replicas_start(self) -> None:
        for entry in self.backend.running():
            if entry.state == "running":
                self.backend.started(entry.job_id)
        self.engine.loop.wait_until_idle()

    @rule()
    def restart(self) -> None:
        self.engine.loop.wait_until_idle()
        before = [(job.id, job.state, job.gpus, job.generation, job.crashes) for job in self.engine.jobs()]
        self.engine.stop("keep")
        self.begin()
        after = [(job.id, job.state, job.gpus, job.generation, job.crashes) for job in self.engine.jobs()]
        assert after == before

    @invariant()
    def nothing_is_oversubscribed(self) -> None:
        if hasattr(self, "engine"):
            self.engine.loop.wait_until_idle()
            for node in result_of(self.engine.status()).nodes:
                assert node.used <= node.gpus


def test_every_operation_is_driven():
    """Those whose right body is known here are done; each of the others is asked for at least."""
    assert {operation.path for operation in OPERATIONS if operation.takes is not None} == set(BODIES)
    machine = Api()
    machine.open("pollux", "1..4")
    try:
        for operation in OPERATIONS:
            body = BODIES[operation.path][0] if operation.takes is not None else None
            answer = machine.do(operation, "a", body, {"follow": "false"} if operation.name == "events" else {})
            assert answer.status_code in (200, 201, 202, *operation.errors), (operation.name, answer.text)
    finally:
        machine.teardown()


# The long set is drawn from the seed, the short one is always the same.
if "POLLUX_FAULT_SEED" in os.environ or "POLLUX_FAULT_EVENTS" in os.environ:
    seed(SEED)(Api)
Api.TestCase.settings = settings(
    max_examples=EVENTS, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestApi = Api.TestCase
