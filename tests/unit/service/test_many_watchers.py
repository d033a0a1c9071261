"""What the page asks for again and again, when many look at it; and that the benchmark's viewers ask for the same."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pollux.controller import ENDED, JobRecord, JobState
from pollux.controller.messages.events import JobSpec
from pollux.core import JobLimits
from pollux.service.views.job_board import JobBoard, JobEntry

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "src/pollux/service/web/static/js"


@pytest.fixture
def crowd(world):
    """Nine who follow the events; what they hear is of no interest."""
    feed = world.engine.views.feed
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
    asked = counted(monkeypatch, world.engine.loop, "read")
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
    made = counted(monkeypatch, JobBoard, "entries")

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


def entry(job_id, state):
    return JobEntry(JobRecord(JobSpec(job_id, limits=JobLimits()), 0.0, state), {}, None, None)


def test_lists_by_state_are_what_a_walk_over_all_would_find():
    draw = random.Random(7)
    board, states = JobBoard(), {}
    for step in range(400):
        job_id = f"job-{draw.randrange(60)}"
        states[job_id] = draw.choice(list(JobState))
        board.put(entry(job_id, states[job_id]))
        if step % 50 == 49:
            gone = set(draw.sample(sorted(states), 3))
            board.remove(gone)
            states = {name: state for name, state in states.items() if name not in gone}
        if step % 7:
            continue
        order = [one.record.spec.id for one in board.entries()]
        assert sorted(order) == sorted(states)
        after = draw.choice([None, *order])
        rest = order if after is None else order[order.index(after) + 1 :]

        def found(after=after, **wanted):
            return [one.record.spec.id for one in board.entries(after, **wanted)]

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
    assert number(r"EVENTS_RECALLED = (\d+)", cluster) == viewers.EVENTS_RECALLED
    # The first view, and how far back the timeline goes from then on.
    begin = timeline.partition("async begin() {")[2].partition("\n  }\n")[0]
    assert number(r"this\.span = (\d+);\n +await this\.refresh\(\);", begin) == viewers.FIRST_SPAN_SECONDS
    assert begin.rstrip().endswith("this.fit();")
    assert number(r"this\.refresh\(\)\), (\d+)\);", timeline) / 1000 == viewers.SOON_SECONDS
    assert number(r"LEAST_SPAN = (\d+)", timeline) == viewers.LEAST_SPAN_SECONDS
    spans = re.search(r"SPANS = \[(.*)\];", timeline)[1]
    assert tuple(float(seconds) for seconds in re.findall(r"\", (\d+)", spans)) == viewers.SPANS_SECONDS
    fitting = timeline.partition("  fitting() {")[2].partition("\n  }\n")[0]
    assert "Math.max((this.now() - this.first) * 1.1, LEAST_SPAN)" in fitting
    assert "wanted > 600 && seconds >= 0.9 * wanted) ?? Math.min(wanted, 86400)" in fitting
    assert number(r"margin = ([\d.]+) \* this\.span", timeline) == 0.05
    # Every request of the cluster page, of whichever module, is one of those.
    asked = set(re.findall(r"get\([`\"](/v1/[a-z]+)", cluster + shell + timeline)) | {"/v1/jobs"}
    assert "eventsAfter(Math.max(revision - EVENTS_RECALLED, 0))" in cluster
    assert 'fetch("/v1/events?follow=false"' in live
    paths = {path.partition("?")[0] for path in (*viewers.OVERVIEW, *viewers.JOBS, "/v1/timeline")}
    assert asked == paths
    assert len(re.findall(r"list\(\"(?:queued|paused)\"\)", cluster)) == 2


@pytest.mark.parametrize(
    ("ran", "span"),
    [(0, 30), (100, 110), (600, 900), (890, 900), (3000, 3600), (3700, 21600), (40000, 86400), (1e6, 86400)],
)
def test_the_timeline_of_the_viewers_goes_back_as_far_as_anything_ran(monkeypatch, ran, span):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    viewers = importlib.import_module("viewers")
    assert viewers.fitting(ran) == pytest.approx(span)


def test_opening_a_page_is_part_of_the_benchmark(monkeypatch, world, client):
    """The viewer's requests until it has what a page shows at first, answered by the real service."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    viewers = importlib.import_module("viewers")
    clock = SimpleNamespace(time=lambda: world.clock.time, perf_counter=time.perf_counter)
    monkeypatch.setattr(viewers, "time", clock)
    world.submit("a", max_gpus=1)
    world.after(300.0)
    asked = []

    async def ask(self, method, path, body=b"", headers=""):
        answer = client.request(method, path, headers=dict([headers.strip().split(": ")]) if headers else {})
        asked.append(path)
        return answer.status_code, answer.content

    monkeypatch.setattr(viewers.Client, "ask", ask)
    monkeypatch.setattr(viewers, "SOON_SECONDS", 0.0)
    crowd = viewers.Crowd(0, "", 1)
    page = viewers.Page(crowd)

    async def look():
        await page.opening()
        await page.recall()
        await page.fitted()

    asyncio.run(look())
    assert crowd.errors == 0
    read = {"/static/js/cluster.js", "/static/js/timeline.js", "/static/js/words.js", "/static/js/shared.js"}
    assert {"/", "/static/css/base.css", *read} <= set(asked)
    assert len(asked) == len(set(asked)), "nothing is read twice"
    data = [path for path in asked if path.startswith("/v1/")]
    assert data[0] == "/v1/session"
    assert set(data[1:6]) == {*viewers.OVERVIEW, *viewers.JOBS}
    now = world.clock.time
    assert data[6:] == [
        f"/v1/timeline?since=0.0&until={now:.1f}&limit={viewers.TIMELINE_JOBS}",
        "/v1/events?follow=false",
        f"/v1/timeline?since={now - 1.05 * 1.1 * (now - page.first):.1f}&until={now:.1f}&limit={viewers.TIMELINE_JOBS}",
    ]
    assert page.first == pytest.approx(1010.0, abs=10.0), "when its job got its GPU"
    assert page.revision == world.engine.store.revision
