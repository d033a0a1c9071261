"""The API against its own description: everything that schemathesis knows to ask, stateful too, finds nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, seed, settings
from schemathesis import Case

from pollux import policies
from pollux.core import Node
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.service.http.openapi import describe
from pollux.service.http.uploads import Packages
from pollux.service.replay.replays import Replays
from pollux.service.server.app import operations
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import FakeBackend, ManualClock, result_of
from pollux.wire.job import JobRequest
from pollux.wire.report import LARGEST_BATCH, LARGEST_SECONDS

EXAMPLES = int(os.environ.get("POLLUX_SCHEMA_EXAMPLES", "15"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20214"))
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    stateful_step_count=12,
)
# The long set is drawn from the seed, the short one is always the same.
SEEDED = seed(SEED) if "POLLUX_SCHEMA_EXAMPLES" in os.environ else lambda test: test
TOKENS = Tokens("operator-token-for-tests", "secret-for-tests")
HEADERS = {"Authorization": f"Bearer {TOKENS.operator}"}
HERE = str(Path(__file__).parent)
REPORTING = "reporting"
JOB_ID = re.compile(r"[a-z0-9]([a-z0-9._-]{0,70}[a-z0-9])?")


class Late:
    """Tests are made from the description before there is an engine; calls go to the one of the running test.

    Between two calls three seconds pass, and everything that is due happens: the same calls give the same answers.
    """

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.folder = tempfile.TemporaryDirectory(prefix="pollux-packages-")
        self.engine: Engine | None = None
        self.app: Any = None

    def open(self) -> None:
        self.close()
        self.clock = ManualClock(1000.0)
        self.engine = Engine(
            policies.create("pollux"),
            FakeBackend([Node("node-0", 4, "cpu")], self.clock, by_itself=True),
            MemoryStore(),
            MemoryTelemetry(),
            ServiceSettings(home=Path(HERE)),
            self.clock,
            TOKENS,
        )
        # At the addresses of stores that are thought up here there is none.
        self.engine.admission.check_store = lambda request: None  # type: ignore[method-assign]
        self.engine.start()
        self.engine.loop.wait_until_idle()
        result_of(
            self.engine.submit(JobRequest(name=REPORTING, run=("sleep", "1"), workdir=HERE, min_gpus=1, max_gpus=4))
        )
        self.engine.loop.wait_until_idle()
        self.app = create_app(self.engine, TOKENS, ["testserver"])
        # What a replay does is not what is tested here: its process ends at once.
        self.app._app.state.replays = Replays(list, ("false",))
        self.app._app.state.packages = Packages(Path(self.folder.name))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.stop("keep")
            self.engine = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/events" and scope["query_string"] in (b"", b"follow=true"):
            scope = {**scope, "query_string": b"follow=false"}  # a stream that is followed has no end
        await self.app(scope, receive, send)
        assert self.engine is not None
        await asyncio.to_thread(self.clock.set, self.clock.time + 3.0, self.engine)
        await asyncio.to_thread(self.engine.loop.wait_until_idle)
        replay = self.app._app.state.replays._thread
        if replay is not None:
            # One that is under way refuses the next: how long its process takes must not decide an answer.
            await asyncio.to_thread(replay.join, 60)


LATE = Late()


@pytest.fixture(scope="module", autouse=True)
def engine():
    LATE.open()
    yield
    LATE.close()


def of_this_machine(document: dict[str, Any]) -> dict[str, Any]:
    """What no description can say: folders and commands of this machine, and numbers that must fit each other."""
    shapes = document["components"]["schemas"]
    job = shapes["JobFile"]["properties"]
    job["run"] = {"enum": ["sleep 1", ["sleep", "2"]]}
    job["workdir"] = {"const": HERE}
    job["after"] = {"type": "array", "items": {"type": "string", "pattern": "^other-[0-9]$"}, "uniqueItems": True}
    del job["batch_size"]["anyOf"][1]["properties"]["initial"]
    job["on_resize"] = {"enum": ["live", "restart"]}
    # Whether a deadline is past depends on when it is read.
    del job["deadline"]
    # Each place once, on as many nodes as it has GPUs, or fewer.
    del shapes["ModelReport"]["properties"]["places"]
    return document


def fitted(case: Case[Any]) -> Case[Any]:
    """The same case; numbers of a report that are right each for itself are made to fit each other."""
    if case.path != "/v1/jobs/{job_id}/reports" or not isinstance(case.body, dict):
        return case
    if JOB_ID.fullmatch(str(case.path_parameters.get("job_id"))):
        # Of a job that there is, or nothing else of the report would be looked at.
        case.path_parameters["job_id"] = REPORTING
    if is_whole(generation := case.body.get("generation"), 0):
        # Of the replicas that run, or of those before them.
        case.body["generation"] = generation % 2
    model: Any = case.body.get("model")
    if isinstance(model, dict):
        sizes: list[Any] = [model.get(name) for name in ("initial_batch", "max_batch", "local_batch_max")]
        if all(is_whole(size, 1, LARGEST_BATCH) for size in (*sizes, model.get("local_batch_min", 1))):
            model["max_batch"] = max(sizes[:2])
            model["local_batch_min"] = min(model.get("local_batch_min", 1), sizes[0], sizes[2])
        parameters = model.get("parameters")
        if isinstance(parameters, list) and len(parameters) == 7 and all(map(is_time, parameters)):
            parameters[0] = max(parameters[0], 1e-6)
            parameters[6] = 1.0 + parameters[6] % 9.0
    return case


def is_whole(value: Any, least: int, most: int = 2**63 - 1) -> bool:
    return is_number(value) and least <= value <= most and value == int(value)


def is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LARGEST_SECONDS


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


schema = schemathesis.openapi.from_dict(of_this_machine(json.loads(json.dumps(describe(operations())))))
schema.app = LATE
schema.location = "/openapi.json"
# Every call shows the token; what comes without one, or with another, is asked by the check of ignored authentication.
schema.config.generation.with_security_parameters = False


@schema.parametrize()
@SEEDED
@QUIET
def test_every_operation_does_as_described(case: Case[Any]) -> None:
    fitted(case).call_and_validate(headers=HEADERS)


def test_operations_that_follow_each_other():
    machine = schema.as_state_machine()

    class Operator(machine):  # type: ignore[misc, valid-type]
        def setup(self) -> None:
            LATE.open()

        def get_call_kwargs(self, case: Case[Any]) -> dict[str, Any]:
            fitted(case)
            return {"headers": HEADERS}

    SEEDED(Operator).run(settings=QUIET)
