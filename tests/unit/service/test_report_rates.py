"""However often a job reports, and whatever: the store grows within bounds, and the others are answered."""

import dataclasses

import pytest
from starlette.testclient import TestClient

from pollux.core.errors import InvalidInput
from pollux.service import create_app
from pollux.service.clocks.job_rates import JobRates
from pollux.service.http.routes import jobs as routes
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.wire import codec
from pollux.wire.report import MOST_METRIC_LETTERS, MOST_METRICS


def test_a_job_has_its_burst_and_then_its_rate():
    rates = JobRates(burst=3, refill_seconds=2.0)
    assert [rates.take("a", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert rates.take("b", 0.0), "each job has its own"
    assert [rates.take("a", at) for at in (1.9, 2.0, 3.0, 4.0)] == [False, True, False, True]
    assert sum(rates.take("a", 1000.0) for _ in range(10)) == 3
    assert not rates.take("a", 0.0), "a clock that went back gives nothing"
    kept = JobRates(burst=3, refill_seconds=2.0)
    assert [kept.take("a", 0.0, reserve=2) for _ in range(2)] == [True, False]
    assert [kept.take("a", 0.0) for _ in range(3)] == [True, True, False]


def test_what_is_kept_of_jobs_is_bounded(monkeypatch):
    from pollux.service.clocks import job_rates

    monkeypatch.setattr(job_rates, "_MOST_JOBS", 100)
    rates = JobRates(burst=3, refill_seconds=2.0)
    for number in range(1000):
        assert rates.take(str(number), 0.0)
    assert len(rates._left) == 100


def facts(world):
    return world.engine.store.revision


def test_reports_in_turn_become_few_facts(world):
    """Each of these is news: the remaining work moves by more than 2 %."""
    world.submit("job")
    before = facts(world)
    for number in range(10_000):
        report = sample_report(world.engine.job("job").generation, progress=100.0 + 400.0 * (number % 2))
        world.engine.report("job", report)
    result_of(world.engine.report("job", report))
    assert 2 <= facts(world) - before <= 25
    assert len(world.telemetry.series("job", "report", 0.0, 10**6)) < 2_500
    grown = facts(world)
    world.after(60.0)
    grown = facts(world) - grown
    for _ in range(3):
        result_of(world.engine.report("job", dataclasses.replace(report, total_progress=5000.0)))
    assert facts(world) > before + grown, "what is news later becomes a fact"


@pytest.fixture
def client(world, monkeypatch):
    world.submit("job")
    world.submit("other")
    now = [1000.0]
    monkeypatch.setattr(routes.time, "monotonic", lambda: now[0])
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        client.world, client.clock = world, now
        yield client


def post(client, job="job", **fields):
    report = codec.encode(sample_report(client.world.engine.job(job).generation, **fields))
    token = client.world.tokens.for_job(job)
    return client.post(f"/v1/jobs/{job}/reports", json=report, headers={"Authorization": f"Bearer {token}"})


def test_too_many_reports_of_one_job_are_put_off(client):
    answers = [post(client) for _ in range(120)]
    refused = [each for each in answers if each.status_code == 429]
    assert 40 <= len(refused) <= 80
    assert refused[-1].headers["retry-after"] == "1"
    assert refused[-1].json()["error"]["retryable"]
    assert "job 'job' reports too often" in refused[-1].json()["error"]["message"]
    assert post(client, "other").status_code == 200
    assert post(client, final=True).status_code == 200, "the last report of a job that is done has its place"
    client.clock[0] += 3600.0
    for _ in range(200):
        client.clock[0] += 1.0
        assert post(client).status_code == 200, "one a second is always taken"


def test_metrics_are_bounded(client):
    most = {f"{number}".rjust(MOST_METRIC_LETTERS, "x"): 1.0 for number in range(MOST_METRICS)}
    assert post(client, metrics=most).status_code == 200
    for metrics in ({**most, "more": 1.0}, {"x" * (MOST_METRIC_LETTERS + 1): 1.0}):
        answer = post(client, metrics=metrics)
        assert answer.status_code == 422
        assert "metric" in answer.json()["error"]["message"]
    with pytest.raises(InvalidInput, match="metrics; give at most"):
        result_of(client.world.engine.report("job", sample_report(0, model=SAMPLE_MODEL, metrics={**most, "x": 0.0})))
