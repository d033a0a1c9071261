from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from pollux.controller import JobState
from pollux.service import create_app
from pollux.service.presenters import metrics
from pollux.service.presenters.cluster_summary import summary_of
from pollux.service.presenters.metrics import NAMES, OTHER, families
from pollux.service.presenters.prometheus_text import CONTENT_TYPE, Family, text_of
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def numbers(engine):
    desk = engine.views
    return families(engine, summary_of(desk.board, desk.timeline, engine.cluster, engine.now()))


def samples(engine):
    return {family.name: family.samples for family in numbers(engine)}


@pytest.fixture
def client(world):
    with TestClient(create_app(world.engine, world.tokens), base_url="http://127.0.0.1:7341") as client:
        yield client


def test_the_text_format():
    odd = Family("pollux_odd", "gauge", 'a "b"\\\n')
    odd.add(1.5, job_id='x"\\\ny')
    odd.add(math.inf)
    odd.add(-math.inf)
    odd.add(3.0)
    odd.add(None)
    odd.add(math.nan)
    odd.add(1e300)
    assert text_of([odd, Family("pollux_none", "counter", "nothing")]).decode().splitlines() == [
        '# HELP pollux_odd a "b"\\\\\\n',
        "# TYPE pollux_odd gauge",
        'pollux_odd{job_id="x\\"\\\\\\ny"} 1.5',
        "pollux_odd +Inf",
        "pollux_odd -Inf",
        "pollux_odd 3",
        "pollux_odd 1e+300",
    ]


def test_a_token_is_needed_and_the_viewers_is_enough(world, client):
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"authorization": f"Bearer {world.tokens.for_job('a')}"}).status_code == 403
    for token in (world.tokens.viewer, world.tokens.operator):
        answer = client.get("/metrics", headers={"authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
        assert "\npollux_gpus 4\n" in answer.text
        assert answer.text.endswith("\n")


def test_every_number_is_documented_with_its_kind_and_labels(world):
    rows = dict(re.findall(r"^\| `(pollux_\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE))
    assert sorted(rows) == sorted(NAMES)
    labels = dict(re.findall(r"^\| `(pollux_\w+)` \| \w+ \|([^|]*)\|", PAGE.read_text(), re.MULTILINE))
    world.submit("a", max_gpus=1)
    for family in numbers(world.engine):
        assert rows[family.name] == family.kind
        assert family.name.endswith("_total") == (family.kind == "counter")
        for found, _ in family.samples:
            assert {f"`{name}`" for name in found} == set(re.findall(r"`\w+`", labels[family.name])), family.name


def test_what_a_job_reported_is_told(world):
    world.submit("a", max_gpus=1, queue="vision")
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    result_of(world.engine.report("a", sample_report(1, 250.0, model=SAMPLE_MODEL, loss=0.5)))
    found = samples(world.engine)
    labels = {"job_id": "a", "queue": "vision"}
    assert found["pollux_job_goodput"] == [(labels, 40.0)]
    assert found["pollux_job_progress_ratio"] == [(labels, 0.25)]
    assert found["pollux_job_loss"] == [(labels, 0.5)]
    assert found["pollux_job_noise_scale"] == []
    assert found["pollux_queue_gpus"] == [({"queue": "vision"}, 1.0)]
    assert found["pollux_resident_memory_bytes"][0][1] > 1e6


def test_labels_are_bounded(make_world, monkeypatch):
    world = make_world(gpus=8)
    monkeypatch.setattr(metrics, "MOST_JOBS", 3)
    monkeypatch.setattr(metrics, "MOST_QUEUES", 2)
    for number in range(6):
        world.submit(f"j{number}", min_gpus=1, max_gpus=1, queue=f"q{number % 4}")
    found = samples(world.engine)
    assert len(found["pollux_job_gpus"]) == 4
    assert found["pollux_job_gpus"][-1] == ({"job_id": OTHER, "queue": OTHER}, 3.0)
    assert len(found["pollux_queue_gpus"]) == 3
    assert sum(value for _, value in found["pollux_queue_gpus"]) == 6.0
    assert sum(value for _, value in found["pollux_job_gpus"]) == 6.0


def test_a_job_of_a_queue_without_a_label_has_none_either(make_world, monkeypatch):
    world = make_world(gpus=8)
    monkeypatch.setattr(metrics, "MOST_QUEUES", 2)
    for number in range(4):
        job_id = world.submit(f"j{number}", min_gpus=1, max_gpus=1, queue=f"q{number}")
        world.backend.started(job_id)
        world.engine.loop.wait_until_idle()
        result_of(world.engine.report(job_id, sample_report(world.engine.job(job_id).generation, loss=0.5)))
    found = samples(world.engine)
    for name in ("pollux_queue_gpus", "pollux_job_gpus", "pollux_job_loss"):
        assert {labels["queue"] for labels, _ in found[name]} == {"q0", "q1", OTHER}, name
    assert [labels["job_id"] for labels, _ in found["pollux_job_gpus"]] == ["j0", "j1", "j2", "j3"]


def test_every_state_has_its_number(world):
    world.submit("a", max_gpus=1)
    found = {labels["state"]: value for labels, value in samples(world.engine)["pollux_jobs"]}
    assert set(found) == {str(state) for state in JobState}
    assert (found["starting"], found["failed"]) == (1.0, 0.0)


def test_what_forgotten_jobs_held_stays_in_the_counter(world):
    job_id = world.submit("a", max_gpus=1)
    world.backend.started(job_id)
    world.after(100.0)
    result_of(world.engine.cancel(job_id))
    world.backend.ended(job_id, "stopped")
    world.engine.loop.wait_until_idle()

    def held():
        ((_, value),) = samples(world.engine)["pollux_gpu_seconds_total"]
        return value

    before = held()
    assert before >= 100.0
    world.engine.views.board.remove({job_id})
    assert held() == before


def test_rates_from_before_its_present_gpus_are_left_out(world):
    job_id = world.submit("a", max_gpus=1)
    world.backend.started(job_id)
    world.engine.loop.wait_until_idle()
    result_of(world.engine.report(job_id, sample_report(1, goodput=80.0, throughput=100.0)))
    assert [value for _, value in samples(world.engine)["pollux_job_goodput"]] == [80.0]
    world.after(50.0)
    result_of(world.engine.pause(job_id))
    world.backend.ended(job_id, "stopped")
    result_of(world.engine.resume(job_id))
    world.after(50.0)
    found = samples(world.engine)
    assert world.engine.job(job_id).gpus == 1
    assert found["pollux_job_gpus"][0][1] == 1.0
    assert not found.get("pollux_job_goodput")
    assert not found.get("pollux_job_throughput")
