from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest

from pollux.core import Cluster, Node
from pollux.service.http.shared_cache import SharedCache
from pollux.service.presenters.cluster_summary import goodputs
from pollux.service.presenters.job_series import predicted_seconds
from pollux.service.presenters.receipts import LARGEST_RECEIPT
from pollux.service.views.fairness import Fairness
from pollux.service.views.goodput_curves import points_of, static_model
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.wire.codec import encode


def trained(world, name, **fields):
    """A job that runs and whose agent has told what it has learned."""
    job_id = world.submit(name, **fields)
    world.backend.started(job_id)
    world.engine.loop.wait_until_idle()
    report = sample_report(world.engine.job(job_id).generation, model=SAMPLE_MODEL, total_progress=1e6, progress=2e5)
    result_of(world.engine.report(job_id, report))
    world.after(3.0)
    return job_id


def test_the_summary_in_numbers(world, client):
    trained(world, "a", max_gpus=2)
    world.submit("waits", min_gpus=4, max_gpus=4)
    found = client.get("/v1/summary").json()
    held = world.engine.job("a").gpus
    assert found["gpus"] == {"total": 4, "used": held, "utilisation": held / 4}
    assert sum(found["jobs_by_state"].values()) == 2
    assert found["goodput"]["jobs"] == 1
    assert found["goodput"]["unknown_jobs"] == 1
    assert found["goodput"]["now"] > 0
    assert found["goodput"]["ratio"] == pytest.approx(found["goodput"]["now"] / found["goodput"]["static"])
    assert [entry["job"] for entry in found["fairness"]["jobs"]] == ["a"]
    assert found["fairness"]["worst"] == pytest.approx(client.get("/v1/jobs/a").json()["fairness"], rel=1e-3)
    assert found["reallocations"]["gpu_seconds"] >= 0
    assert found["false_alarms"] is None


def test_an_empty_cluster_has_a_summary(client):
    found = client.get("/v1/summary").json()
    assert found["goodput"] == {
        "now": 0.0, "static": 0.0, "ratio": None, "jobs": 0, "static_jobs": 0, "unknown_jobs": 0,
    }  # fmt: skip
    assert found["fairness"]["median"] is None


def test_goodput_against_a_static_allocation(world):
    trained(world, "a", min_gpus=4, max_gpus=4)
    cluster = world.engine.cluster
    (entry,) = world.engine.views.board.entries()
    model = entry.record.goodput
    held = entry.record.placement.num_gpus
    assert held == 4
    found = goodputs([entry], cluster)
    unit = static_model(model).goodput(1, 4, "cpu")
    assert found["now"] == pytest.approx(model.goodput(1, 4, "cpu") / unit)
    assert found["static"] == pytest.approx(1.0)
    assert found["ratio"] > 1.0, "the same GPUs, a better batch"
    assert static_model(model).best_batch(1, 4, "cpu")[0].total == 128
    assert goodputs([entry, entry], cluster)["static_jobs"] == 1, "no GPUs are left for the second"


def test_later_smaller_jobs_fill_what_a_static_allocation_leaves(make_world):
    world = make_world(gpus=8)
    asks = {"wide": (1, 6), "large": (1, 4), "small": (1, 1), "tiny": (1, 1), "late": (1, 1)}
    for name, (least, most) in asks.items():
        trained(world, name, min_gpus=least, max_gpus=most)
    cluster = world.engine.cluster
    entries = list(world.engine.views.board.entries())
    assert [entry.record.spec.id for entry in entries] == list(asks)
    models = {entry.record.spec.id: entry.record.goodput for entry in entries}

    def plain(name, gpus):
        return static_model(models[name]).goodput(1, gpus, "cpu")

    three = goodputs(entries[:3], cluster)
    assert three["static"] == pytest.approx(plain("wide", 6) / plain("wide", 1) + 1.0), "the large one gets none"
    assert (three["static_jobs"], three["unknown_jobs"]) == (2, 0)
    held = {entry.record.spec.id: entry.record.placement.num_gpus for entry in entries[:3]}
    alone = [models[name].goodput(1, gpus, "cpu") / plain(name, 1) for name, gpus in held.items() if gpus]
    assert three["now"] == pytest.approx(sum(alone))
    assert three["jobs"] == len(alone)
    assert three["ratio"] == pytest.approx(three["now"] / three["static"])
    five = goodputs(entries, cluster)
    assert five["static"] == pytest.approx(three["static"] + 1.0), "one more fits, the last one does not"
    assert five["static_jobs"] == 3


def test_finish_time_fairness_by_hand(world):
    trained(world, "a", min_gpus=4, max_gpus=4)
    cluster = world.engine.cluster
    (entry,) = world.engine.views.board.entries()
    record, now = entry.record, world.clock.time
    alone = Fairness(cluster, 1, now).of(entry)
    rate = record.goodput.goodput(1, 4, "cpu")
    assert alone == pytest.approx((now - record.submitted_at + record.remaining / rate) / (1e6 / rate))
    assert alone < 1.0, "a fifth was done by its first report"
    crowd = Fairness(cluster, 8, now).of(entry)
    slow = rate / 8
    assert crowd == pytest.approx((now - record.submitted_at + record.remaining / rate) / (1e6 / slow))
    assert Fairness(Cluster(()), 1, now).of(entry) is None


def test_the_speedup_curve(world, client):
    world.submit("new", max_gpus=1)
    assert client.get("/v1/jobs/new/speedup").json()["points"] is None
    trained(world, "a", max_gpus=2)
    found = client.get("/v1/jobs/a/speedup").json()
    assert found["current"] == world.engine.job("a").gpus
    points = found["points"]
    assert [point["gpus"] for point in points] == [1, 2, 3, 4]
    assert points[0]["speedup"] == 1.0
    assert all(left["goodput"] < right["goodput"] for left, right in pairwise(points))
    model = world.engine.views.board.get("a").record.goodput
    assert points[3]["batch_size"] == model.best_batch(1, 4, "cpu")[0].total
    assert client.get("/v1/jobs/none/speedup").status_code == 404


def test_the_curve_of_a_large_cluster_has_few_points(world):
    trained(world, "a", max_gpus=4)
    record = world.engine.views.board.get("a").record
    record.spec = type(record.spec)(record.spec.id, limits=type(record.spec.limits)(max_gpus=1000))
    points = points_of(record, Cluster(tuple(Node(f"n{index}", 8, "cpu") for index in range(500))))
    counts = [point["gpus"] for point in points]
    assert len(counts) <= 51
    assert {1, 4, 1000} <= set(counts)


def test_the_timeline_over_http(world, client):
    trained(world, "a")
    found = client.get("/v1/timeline").json()
    assert found["until"] == world.clock.time
    assert found["until"] - found["since"] == 86400
    assert [row["id"] for row in found["jobs"]] == ["a"]
    assert client.get(f"/v1/timeline?since=1&until={world.clock.time}&limit=1").json()["num_jobs"] == 1
    for query in ("since=5&until=5", "since=9&until=5"):
        assert client.get(f"/v1/timeline?{query}").json()["jobs"] == []
    assert client.get("/v1/timeline?since=0&until=1e9").json()["since"] == 1e9 - 90 * 86400
    for query in ("limit=0", "limit=201", "since=-1"):
        answer = client.get(f"/v1/timeline?{query}")
        assert answer.status_code == 422, query
    assert client.get("/v1/timeline?since=x").status_code == 422


def test_people_who_look_at_the_same_hours_share_an_answer(world, client):
    trained(world, "a")
    first = client.get("/v1/timeline?since=1000&until=51000").json()
    assert first["since"] == 1000
    assert client.get("/v1/timeline?since=1001&until=51001.5").json() == first
    assert client.get("/v1/timeline?since=2000&until=51000").json()["since"] == 2000
    assert client.get("/v1/timeline?since=1000&until=1100").json()["until"] == 1100


def test_series_have_predictions_and_reasons(world, client):
    job_id = trained(world, "a", max_gpus=1)
    generation = world.engine.job(job_id).generation
    for step in range(3):
        world.after(10.0)
        report = sample_report(generation, 100.0 * step, accumulation=0, model=SAMPLE_MODEL, step_seconds=0.5)
        result_of(world.engine.report(job_id, report))
    rows = client.get(f"/v1/jobs/{job_id}/series").json()["rows"]
    assert rows[0]["values"]["predicted_step_seconds"] is None, "nothing was known before"
    for row in rows[1:]:
        assert row["values"]["predicted_step_seconds"] == pytest.approx(0.1 + 0.002 * 128)
    for name in ("num_replicas", "batch_size", "local_batch", "accumulation", "learning_rate_factor", "throughput",
                 "efficiency", "goodput", "noise", "loss", "metrics", "samples", "step_seconds"):  # fmt: skip
        assert name in rows[-1]["values"], name
    later = client.get(f"/v1/jobs/{job_id}/series?since={rows[2]['at']}").json()["rows"]
    assert later == rows[2:]
    (started,) = client.get(f"/v1/jobs/{job_id}/series?kind=decision").json()["rows"]
    assert (started["values"]["from"], started["values"]["to"]) == (0, 1)
    assert started["values"]["text"].startswith("given 1 GPU")
    assert client.get(f"/v1/jobs/{job_id}/series?kind=decision&since={world.clock.time}").json()["rows"] == []


def test_a_prediction_of_nonsense_is_none():
    values = encode(sample_report(1))
    assert predicted_seconds(None, values) is None
    assert predicted_seconds({"parameters": [1, 2]}, values) is None
    assert predicted_seconds({"parameters": ["x"] * 7}, values) is None
    assert predicted_seconds({}, values) is None
    assert predicted_seconds(encode(SAMPLE_MODEL), {**values, "num_replicas": 0}) is None


def test_receipts_are_read_with_care(world, client):
    world.submit("a", max_gpus=1)
    assert client.get("/v1/jobs/a/receipt").json() == {"receipt": None}
    assert client.get("/v1/jobs/none/receipt").status_code == 404
    folder = world.home / "receipts" / "a"
    folder.mkdir(parents=True)
    place = folder / "receipt.json"
    place.write_text('{"schema": "pollux-receipt", "loss": NaN, "text": "<script>"}')
    found = client.get("/v1/jobs/a/receipt")
    assert found.json()["receipt"] == {"schema": "pollux-receipt", "loss": None, "text": "<script>"}
    place.write_text('{"loss": 1e999, "all": [-1e999, {"x": 1.5e3}], "steps": 12}')
    found = client.get("/v1/jobs/a/receipt")
    assert "Infinity" not in found.text
    assert found.json()["receipt"] == {"loss": None, "all": [None, {"x": 1500.0}], "steps": 12}
    for damaged in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        place.write_bytes(damaged)
        assert client.get("/v1/jobs/a/receipt").json() == {"receipt": None}
    place.write_bytes(b" " * (LARGEST_RECEIPT + 1))
    assert client.get("/v1/jobs/a/receipt").status_code == 413


def test_what_many_ask_for_is_made_once():
    made = []
    now = [0.0]

    def make():
        made.append(1)
        return json.dumps(len(made)).encode()

    async def ask():
        kept = SharedCache(2.0, lambda: now[0])
        first = await asyncio.gather(*(kept.get("a", make) for _ in range(10)))
        now[0] = 1.0
        again = await kept.get("a", make)
        now[0] = 4.0
        later = await kept.get("a", make)
        for number in range(100):
            await kept.get(number, make)
        return first, again, later, len(kept._entries)

    first, again, later, entries = asyncio.run(ask())
    assert (set(first), again, later) == ({b"1"}, b"1", b"2")
    assert entries == 32


def test_a_failure_is_told_and_not_kept():
    def fail():
        raise ValueError("no")

    async def ask():
        kept = SharedCache(2.0)
        with pytest.raises(ValueError, match="no"):
            await kept.get("a", fail)
        return await kept.get("a", lambda: b"good")

    assert asyncio.run(ask()) == b"good"


def test_an_explanation_names_jobs_that_have_ended(world, client):
    world.submit("first", max_gpus=1)
    world.submit("second", max_gpus=1, after=("first",))
    waits = client.get("/v1/jobs/second/explain").json()
    assert (waits["text"], waits["jobs"]) == ("runs after first", ["first"])
    assert client.get("/v1/jobs/second").json()["job"]["reason"]["jobs"] == ["first"]
    result_of(world.engine.cancel("first"))
    world.engine.loop.wait_until_idle()
    failed = client.get("/v1/jobs/second/explain").json()
    assert failed["text"].startswith("failed: it was to run after first")
    assert failed["jobs"] == ["first"]
    assert client.get("/v1/jobs/second").json()["events"][-1]["jobs"] == ["first"]


def test_an_explanation_names_who_has_to_leave_first(world, client, monkeypatch):
    trained(world, "holds", min_gpus=1, max_gpus=1)
    world.submit("comes", max_gpus=1)
    said = "waits for 'holds', 'nobody' to leave"
    monkeypatch.setattr(world.engine, "leaving_before", lambda job_id: said)
    found = client.get("/v1/jobs/comes/explain").json()
    assert said in found["text"]
    assert found["jobs"] == ["holds"], "a job that is not there has no page"


def test_lists_tell_each_jobs_fairness(world, client):
    trained(world, "a", max_gpus=2)
    world.submit("new", max_gpus=1)
    listed = {job["id"]: job for job in client.get("/v1/jobs").json()["jobs"]}
    assert listed["a"]["fairness"] == pytest.approx(client.get("/v1/jobs/a").json()["fairness"], rel=0.05)
    assert listed["new"]["fairness"] is None
    result_of(world.engine.cancel("a"))
    world.engine.loop.wait_until_idle()
    assert client.get("/v1/jobs").json()["jobs"][0]["fairness"] is None


def test_an_old_change_has_its_sentence_when_its_story_is_gone(world, client):
    job_id = trained(world, "a", max_gpus=1)
    for _ in range(60):
        result_of(world.engine.pause(job_id))
        result_of(world.engine.resume(job_id))
    rows = client.get(f"/v1/jobs/{job_id}/series?kind=decision").json()["rows"]
    assert "placed" not in {line.kind for line in world.engine.events_of(job_id)}
    assert rows[0]["values"]["text"].startswith("started on 1 GPU")
