"""Finish-time fairness: one number for a job, wherever it is shown, and as of the moment in which it is shown."""

from __future__ import annotations

import statistics

import pytest
from starlette.testclient import TestClient

from pollux.service import create_app
from pollux.service.http.routes import pages
from pollux.service.views.fairness import Fairness
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report


@pytest.fixture
def client(world, monkeypatch):
    # Answers that are kept for a moment would be of another moment.
    monkeypatch.setattr(pages, "_KEPT_SECONDS", -1.0)
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        yield client


def trained(world, name, **fields):
    """A job with a model, and reports about it."""
    job_id = world.submit(name, **fields)
    world.backend.started(job_id)
    world.engine.loop.wait_until_idle()
    report = sample_report(world.engine.job(job_id).generation, model=SAMPLE_MODEL, total_progress=1e6, progress=2e5)
    result_of(world.engine.report(job_id, report))
    world.after(3.0)
    return job_id


def listed(client, query="active=true"):
    return {job["id"]: job["fairness"] for job in client.get(f"/v1/jobs?{query}").json()["jobs"]}


def check_all_agree(world, client, *names):
    rows = listed(client)
    known = {name: rho for name, rho in rows.items() if rho is not None}
    assert set(known) == set(names)
    told = client.get("/v1/summary").json()["fairness"]
    assert {one["job"]: one["rho"] for one in told["jobs"]} == pytest.approx(known)
    assert told["median"] == pytest.approx(statistics.median(known.values()))
    assert told["worst"] == pytest.approx(max(known.values()))
    for name, rho in known.items():
        shown = client.get(f"/v1/jobs/{name}").json()
        assert shown["fairness"] == shown["job"]["fairness"] == pytest.approx(rho)
        assert world.engine.job(name).fairness == pytest.approx(rho)
    assert {job.id: job.fairness for job in world.engine.jobs() if job.fairness is not None} == pytest.approx(known)
    metrics = client.get("/metrics").text.splitlines()
    assert f"pollux_fairness_worst {told['worst']!r}" in metrics
    return known


def test_everybody_is_told_the_same_after_others_came_and_went(world, client):
    trained(world, "a", min_gpus=1, max_gpus=1)
    alone = check_all_agree(world, client, "a")["a"]
    trained(world, "b", min_gpus=1, max_gpus=1)
    # Nothing that happens to the others changes the first: it holds what it held.
    for number in range(8):
        world.submit(f"waits-{number}", min_gpus=4, max_gpus=4)
    crowded = check_all_agree(world, client, "a", "b")["a"]
    assert crowded < 0.7 * alone, "its fair share is smaller among ten than alone, and it holds more"
    for number in range(8):
        result_of(world.engine.cancel(f"waits-{number}"))
    result_of(world.engine.cancel("b"))
    assert check_all_agree(world, client, "a")["a"] > crowded / 0.7


def test_it_grows_with_the_time_that_passes_without_any_event(world, client):
    trained(world, "a", min_gpus=1, max_gpus=1)
    before = listed(client)["a"]
    rendered = world.engine.views.board.get("a").rendered
    world.move(world.clock.time + 3600.0)
    assert listed(client)["a"] > before
    assert world.engine.views.board.get("a").rendered is rendered, "the rest of the row is not made anew"
    check_all_agree(world, client, "a")


def test_many_watchers_see_it_move_as_well(world, client):
    trained(world, "a", min_gpus=1, max_gpus=1)
    before = listed(client)["a"]
    feed = world.engine.views.feed
    numbers = [feed.subscribe(lambda text: None, None)[0] for _ in range(9)]
    world.move(world.clock.time + 3600.0)
    assert listed(client)["a"] > before
    for number in numbers:
        feed.unsubscribe(number)


def test_it_is_worked_out_for_the_rows_of_the_page_only(world, client, monkeypatch):
    trained(world, "a", min_gpus=1, max_gpus=1)
    for name in ("b", "c", "d"):
        world.submit(name, min_gpus=1, max_gpus=1)
    result_of(world.engine.cancel("d"))
    asked = []
    inner = Fairness.of

    def counted(self, entry):
        asked.append(entry.record.spec.id)
        return inner(self, entry)

    monkeypatch.setattr(Fairness, "of", counted)
    assert list(listed(client, "limit=2")) == ["a", "b"]
    assert asked == ["a", "b"]
    assert listed(client, "active=false") == {"d": None}


def test_rows_are_what_a_single_answer_is(world, client):
    """The row is put together from bytes that are kept and numbers that move: together they are the whole status."""
    trained(world, "a", min_gpus=1, max_gpus=1)
    world.submit("b", max_gpus=1)
    for row in client.get("/v1/jobs").json()["jobs"]:
        assert row == client.get(f"/v1/jobs/{row['id']}").json()["job"]
