"""What the page asks for again and again, when many look at it; and that the benchmark's viewers ask for the same."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from pollux.controller import ENDED, JobRecord, JobState
from pollux.controller.events import JobSpec
from pollux.core import JobLimits
from pollux.service import create_app
from pollux.service.board import Board, Card

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "src/pollux/service/web/static/js"


@pytest.fixture
def client(world):
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        client.headers["authorization"] = f"Bearer {world.tokens.operator}"
        yield client


@pytest.fixture
def crowd(world):
    """Nine who follow the events; what they hear is of no interest."""
    feed = world.engine.runner.feed
    numbers = [feed.subscribe(lambda text: None, None)[0] for _ in range(9)]
    yield numbers
    for number in numbers:
        feed.unsubscribe(number)


def counted(monkeypatch, thing, name):
    calls = []
    inner = getattr(thing, name)

    def outer(*arguments, **named):
        calls.append(arguments)
        return inner(*arguments, **named)

    monkeypatch.setattr(thing, name, outer)
    return calls


def test_many_share_one_answer_about_the_service(world, client, crowd, monkeypatch):
    world.submit("a", max_gpus=1)
    asked = counted(monkeypatch, world.engine, "_look")
    answers = [client.get("/v1/status") for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert answers[0].json()["jobs_by_state"] == {"starting": 1}
    assert len(asked) < 10, "the engine's thread is asked once a second at most"


def test_a_few_are_told_what_is_so_at_this_moment(world, client):
    client.get("/v1/status")
    client.get("/v1/jobs")
    world.submit("a", max_gpus=1)
    assert client.get("/v1/status").json()["jobs_by_state"] == {"starting": 1}
    assert [job["id"] for job in client.get("/v1/jobs").json()["jobs"]] == ["a"]


def test_many_share_a_page_of_the_list_each_filter_its_own(world, client, crowd, monkeypatch):
    for name in ("a", "b", "c"):
        world.submit(name, min_gpus=2, max_gpus=2)
    made = counted(monkeypatch, Board, "cards")

    def names(query):
        return [job["id"] for job in client.get(f"/v1/jobs?{query}").json()["jobs"]]

    for _ in range(10):
        assert names("state=queued") == ["c"]
        assert names("active=true") == ["a", "b", "c"]
        assert names("active=true&limit=2") == ["a", "b"]
        assert names("after=a") == ["b", "c"]
    assert len(made) < 30
    assert client.get("/v1/jobs?after=nobody").status_code == 404
    assert client.get("/v1/jobs?state=asleep").status_code == 422


def test_the_page_is_told_how_many_watch(client, crowd):
    assert client.get("/v1/summary").json()["watchers"] == 9


def card(job_id, state):
    return Card(JobRecord(JobSpec(job_id, limits=JobLimits()), 0.0, state), {}, None, None)


def test_lists_by_state_are_what_a_walk_over_all_would_find():
    draw = random.Random(7)
    board, states = Board(), {}
    for step in range(400):
        job_id = f"job-{draw.randrange(60)}"
        states[job_id] = draw.choice(list(JobState))
        board.put(card(job_id, states[job_id]))
        if step % 50 == 49:
            gone = set(draw.sample(sorted(states), 3))
            board.remove(gone)
            states = {name: state for name, state in states.items() if name not in gone}
        if step % 7:
            continue
        order = [one.record.spec.id for one in board.cards()]
        assert sorted(order) == sorted(states)
        after = draw.choice([None, *order])
        rest = order if after is None else order[order.index(after) + 1 :]

        def found(after=after, **wanted):
            return [one.record.spec.id for one in board.cards(after, **wanted)]

        assert found() == rest
        for state in JobState:
            assert found(state=str(state)) == [name for name in rest if states[name] is state]
            both = [name for name in rest if states[name] is state and state not in ENDED]
            assert found(state=str(state), active=True) == both
        assert found(active=True) == [name for name in rest if states[name] not in ENDED]
        assert found(active=False) == [name for name in rest if states[name] in ENDED]


def test_viewers_of_the_benchmark_do_what_the_page_does(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    viewers = importlib.import_module("viewers")
    cluster, live = ((SCRIPTS / name).read_text() for name in ("cluster.js", "live.js"))
    table, shell, timeline = ((SCRIPTS / name).read_text() for name in ("jobtable.js", "shell.js", "timeline.js"))

    def number(pattern, text):
        (found,) = re.findall(pattern, text)
        return float(found)

    assert number(r"throttled\(overview, (\d+)\)", cluster) / 1000 == viewers.OVERVIEW_SECONDS
    assert number(r"throttled\(\(\) => jobs\.refresh\(\), (\d+)\)", cluster) / 1000 == viewers.JOBS_SECONDS
    assert number(r"throttled\(\(\) => timeline\.refresh\(\), (\d+)\)", cluster) / 1000 == viewers.TIMELINE_SECONDS
    assert number(r"setInterval\(whenSeen\(all\), (\d+)\)", cluster) / 1000 == viewers.WITHOUT_EVENTS_SECONDS
    assert number(r"QUEUE_SHOWN = (\d+)", cluster) == viewers.QUEUE_SHOWN
    assert number(r"&limit=(\d+)`\)", cluster) == viewers.TIMELINE_JOBS
    assert number(r"const PAGE = (\d+)", table) == viewers.JOBS_SHOWN
    assert number(r"FEW_WATCHERS = (\d+)", live) == viewers.FEW_WATCHERS
    assert number(r"\bspan: (\d+)", timeline) == viewers.SPAN_SECONDS
    # Every request of the cluster page, of whichever module, is one of those.
    asked = set(re.findall(r"get\([`\"](/v1/[a-z]+)", cluster + shell + timeline)) | {"/v1/jobs"}
    paths = {path.partition("?")[0] for path in (*viewers.OVERVIEW, *viewers.JOBS, "/v1/timeline")}
    assert asked == paths
    assert len(re.findall(r"list\(\"(?:queued|paused)\"\)", cluster)) == 2
