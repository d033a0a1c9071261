"""What a job reports, however strange its numbers, never takes the view of other jobs away from people."""

import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pollux.core.errors import InvalidInput
from pollux.service import create_app
from pollux.service.engine.notices import measured_seconds
from pollux.service.views.projector import Projector
from pollux.store.memory import MemoryTelemetry
from pollux.store.protocol import TelemetryRow
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.wire import codec
from pollux.wire.report import NoiseReport, Report

PATHS = (
    "/v1/jobs", "/v1/summary", "/metrics", "/v1/status", "/v1/cluster", "/v1/queues", "/v1/timeline", "/v1/eta",
    "/v1/jobs/odd", "/v1/jobs/odd/explain", "/v1/jobs/odd/series", "/v1/jobs/odd/speedup", "/v1/jobs/good",
    "/v1/jobs/good/explain", "/v1/jobs/good/speedup",
)  # fmt: skip
EDGES = st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 2.3e-308, 1e-300, 1e-30, 1.0, 1e15, 1e29, 1e30, 1e31, 1e308])
NUMBERS = EDGES | st.floats(allow_nan=False)
MODELS = st.none() | st.builds(
    lambda parameters, sqr, var: dataclasses.replace(
        SAMPLE_MODEL, parameters=tuple(parameters), grad_sqr=sqr, grad_var=var
    ),
    st.lists(EDGES, min_size=7, max_size=7),
    EDGES,
    EDGES,
)


@st.composite
def odd_reports(draw):
    """A report of a plain job with some of its numbers at the edges of what a float can say."""
    fields = draw(
        st.lists(
            st.sampled_from(
                ["progress", "epoch", "learning_rate_factor", "efficiency", "throughput", "step_seconds", "goodput",
                 "total_progress", "resize_seconds", "checkpoint_age_seconds", "checkpoint_seconds", "loss"]
            ), unique=True, max_size=6
        )
    )  # fmt: skip
    values = {name: draw(NUMBERS) for name in fields}
    values["noise"] = draw(st.none() | st.builds(NoiseReport, NUMBERS, NUMBERS, st.none() | NUMBERS, st.just(10)))
    values["model"] = draw(MODELS)
    return values


@pytest.fixture
def client(make_world):
    world = make_world(gpus=4)
    for name in ("good", "odd"):
        world.submit(name)
    with TestClient(
        create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341", raise_server_exceptions=False
    ) as client:
        client.headers["Authorization"] = f"Bearer {world.tokens.operator}"
        client.world = world
        yield client


def report(world, job_id, **values):
    generation = world.engine.job(job_id).generation
    return result_of(world.engine.report(job_id, dataclasses.replace(sample_report(generation), **values)))


def _no_json(word):
    pytest.fail(f"an answer has the number {word}, which is no JSON")


def all_answer(client):
    for path in PATHS:
        answer = client.get(path)
        assert answer.status_code in (200, 404), f"{path}: {answer.status_code} {answer.text[:300]}"
        if answer.headers["content-type"].startswith("application/json"):
            json.loads(answer.text, parse_constant=_no_json)


@pytest.mark.parametrize("name", ["total_progress", "progress", "throughput", "goodput", "efficiency"])
def test_a_number_too_small_to_divide_by_is_refused(client, name):
    with pytest.raises(InvalidInput, match=f"job 'odd' reports {name} 5e-324; give 0, or a number from"):
        report(client.world, "odd", **{name: 5e-324})
    all_answer(client)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=odd_reports())
def test_no_report_that_is_taken_breaks_a_view(client, values):
    try:
        report(client.world, "odd", **values)
    except InvalidInput:
        return
    client.world.after(3.0)
    report(client.world, "good", progress=10.0)
    all_answer(client)


def test_a_job_whose_row_cannot_be_made_is_shown_as_such_beside_the_others(client, monkeypatch):
    """Whatever goes wrong in one job's numbers is said on that job."""
    from pollux.service.views import job_board

    real = job_board.estimate

    def broken(record, around, others):
        if record.spec.id == "odd":
            raise OverflowError("int too large to convert to float")
        return real(record, around, others)

    monkeypatch.setattr(job_board, "estimate", broken)
    for job_id in ("good", "odd"):
        report(client.world, job_id, model=SAMPLE_MODEL, total_progress=1e6, progress=1e3)
    all_answer(client)
    rows = {row["id"]: row for row in client.get("/v1/jobs").json()["jobs"]}
    assert rows["good"]["eta"] is not None
    assert rows["odd"]["eta"] is None
    assert math.isclose(rows["odd"]["progress"], 1e-3)


def test_a_store_that_holds_such_a_number_from_before_is_shown(client):
    """Denormals are refused now; a store may hold one that was taken when they were not."""
    from pollux.service.engine import report_events

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(report_events, "SMALLEST_NUMBER", 0.0)
        report(client.world, "odd", model=SAMPLE_MODEL, total_progress=5e-324, progress=0.0)
        report(client.world, "good", model=SAMPLE_MODEL, total_progress=1e6, progress=1e3)
    all_answer(client)
    rows = {row["id"]: row for row in client.get("/v1/jobs").json()["jobs"]}
    assert "fairness cannot be computed" in rows["odd"]["detail"]
    assert rows["odd"]["fairness"] is None
    assert rows["good"]["fairness"] is not None
    assert rows["good"]["detail"] == ""


JSON = st.recursive(
    st.none()
    | st.booleans()
    | EDGES
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers()
    | st.just(10**400)
    | st.text(max_size=5)
    | st.just("x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [field.name for field in dataclasses.fields(Report)]
ETAS = ("issued", "score", "at", "low", "high", "current", "predictions", "misses")


@st.composite
def stored_rows(draw):
    """A stored report of a plain job, some of whose fields hold anything, and a stored row of its ETAs."""
    report = codec.encode(sample_report(draw(st.integers(0, 2)), model=SAMPLE_MODEL))
    report |= draw(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4))
    etas = draw(st.dictionaries(st.sampled_from(ETAS), JSON | st.dictionaries(st.sampled_from(ETAS), JSON), max_size=3))
    return [("report", report), ("eta", etas)]


def stored(*rows):
    telemetry = MemoryTelemetry()
    telemetry.record([TelemetryRow("odd", at, kind, values) for at, (kind, values) in enumerate(rows, start=1)])
    return telemetry


@pytest.fixture
def restarted(client):
    """Start the views anew over a store with these rows, and show all jobs."""
    world = client.world

    def restart(*rows):
        telemetry = stored(*rows)
        views = Projector(telemetry)
        for event in [event for _, event in world.engine.store.read()]:
            views.replay(1, event)
        views.show_all(world.engine.pipeline.controller, world.engine.now())
        world.engine.pipeline.views = views
        world.engine.telemetry = telemetry
        measured_seconds("odd", telemetry.latest("report"))
        return {row["id"]: row for row in client.get("/v1/jobs").json()["jobs"]}

    return restart


def test_a_damaged_report_in_the_store_is_said_on_its_job(client, restarted):
    good = codec.encode(sample_report(1))
    rows = restarted(("report", good | {"total_progress": "x", "progress": 1}))
    assert "report in the store cannot be read" in rows["odd"]["detail"]
    assert "total_progress" in rows["odd"]["detail"]
    assert rows["good"]["detail"] == ""
    all_answer(client)
    report(client.world, "odd")
    after = {row["id"]: row for row in client.get("/v1/jobs").json()["jobs"]}
    assert after["odd"]["detail"] == "", "the next report replaces it"
    assert restarted(("report", good))["odd"]["progress"] == 0.1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=stored_rows())
def test_no_row_in_the_store_breaks_a_view(client, restarted, rows):
    restarted(*rows)
    all_answer(client)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_no_values_of_an_entry_break_a_view(client, values):
    """Were such a report taken after all, its job would be shown without it."""
    board = client.world.engine.views.board
    board.put(dataclasses.replace(board.get("odd"), report=values, rendered=b""))
    all_answer(client)
    rows = {row["id"]: row for row in client.get("/v1/jobs").json()["jobs"]}
    assert sorted(rows) == ["good", "odd"]


@pytest.mark.parametrize("value", [5e-324, -5e-324, 1e-310, 1e308, math.inf])
def test_a_loss_or_metric_out_of_bounds_does_no_harm(client, value):
    if math.isfinite(value):
        report(client.world, "odd", loss=value, metrics={"x": value})
        row = client.get("/v1/jobs/odd/series").json()["rows"][-1]["values"]
        small = abs(value) < 1
        assert row["loss"] == (0.0 if small else None)
        assert row["metrics"] == ({"x": 0.0} if small else {})
    with pytest.raises(InvalidInput, match=r"weight is|Infinity"):
        post_weight(client, value)


def post_weight(client, value):
    answer = client.put("/v1/queues/slow", content=json.dumps({"weight": value}).encode())
    assert answer.status_code == 422, answer.text
    raise InvalidInput(answer.json()["error"]["message"])
