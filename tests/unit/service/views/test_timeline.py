from __future__ import annotations

import json
import random
from collections import deque

import pytest

from pollux.controller import (
    DecisionMade,
    GenerationEnded,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobPaused,
    JobRunning,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
)
from pollux.controller.messages.events import JobSpec
from pollux.core import NOWHERE, Decision, Node, Placement, Reason
from pollux.service.presenters.timeline import MOST_INTERVALS, view_of
from pollux.service.views import timeline as module
from pollux.service.views.timeline import Timeline


def on(count, node="n"):
    return Placement(((node, count),))


def decided(at, reason="grew", **placements):
    reasons = {job_id: Reason(reason) for job_id in placements}
    return DecisionMade(at, 0, Decision(placements, reasons=reasons), partial=True)


@pytest.fixture
def timeline():
    found = Timeline()
    found.add(NodeAdded(0.0, Node("n", 8)))
    for job_id in ("a", "b"):
        found.add(JobSubmitted(0.0, JobSpec(job_id)))
    return found


def intervals(timeline, since=0.0, until=100.0, limit=50):
    view = view_of(timeline.changes(), since, until, limit)
    return {row["name"]: row["intervals"] for row in view["jobs"]}


def test_what_was_held_when(timeline):
    timeline.add(decided(10.0, a=on(2)))
    timeline.add(decided(20.0, a=on(4), b=on(1)))
    timeline.add(decided(30.0, "preempted", a=NOWHERE))
    timeline.add(JobCancelled(60.0, "b"))
    assert intervals(timeline) == {"a": [[10, 20, 2], [20, 30, 4]], "b": [[20, 60, 1]]}
    assert intervals(timeline, 15.0, 25.0) == {"a": [[15, 20, 2], [20, 25, 4]], "b": [[20, 25, 1]]}
    assert intervals(timeline, 70.0, 80.0) == {}


def test_changes_come_with_their_reason(timeline):
    timeline.add(decided(10.0, "started", a=on(2)))
    timeline.add(decided(20.0, a=on(4)))
    view = view_of(timeline.changes(), 0.0, 100.0, 50)
    assert view["reallocations"] == [
        {"at": 10.0, "job": "a", "from": 0, "to": 2, "reason": "started"},
        {"at": 20.0, "job": "a", "from": 2, "to": 4, "reason": "grew"},
    ]
    assert [found.after for found in timeline.reallocations_of("a")] == [2, 4]
    assert timeline.reallocations_of("b") == []
    assert timeline.num_reallocations == 1, "a start is none"


def test_ends_of_the_generation_that_holds_the_gpus_count(timeline):
    timeline.add(decided(10.0, a=on(2)))
    timeline.add(JobRunning(11.0, "a", 1))
    timeline.add(decided(20.0, a=on(4)))
    timeline.add(GenerationEnded(21.0, "a", 1, "stopped"))
    assert intervals(timeline)["a"] == [[10, 20, 2], [20, 100, 4]]
    timeline.add(GenerationShrunk(30.0, "a", 2, on(3)))
    timeline.add(GenerationEnded(40.0, "a", 3, "crashed"))
    assert intervals(timeline)["a"] == [[10, 20, 2], [20, 30, 4], [30, 40, 3]]


def test_a_lost_node_takes_what_was_there(timeline):
    timeline.add(NodeAdded(5.0, Node("m", 4)))
    timeline.add(decided(10.0, a=on(2), b=on(1, "m")))
    timeline.add(NodeRemoved(50.0, "m"))
    assert intervals(timeline) == {"a": [[10, 100, 2]], "b": [[10, 50, 1]]}
    assert view_of(timeline.changes(), 1.0, 100.0, 5)["capacity"] == [[1.0, 8], [5.0, 12], [50.0, 8]]


def test_how_gpus_were_lost_is_told_but_no_change(timeline):
    timeline.add(NodeAdded(5.0, Node("m", 4)))
    for at, loss in (
        (20.0, JobPaused(20.0, "a")),
        (30.0, GenerationEnded(30.0, "a", 9, "crashed")),
        (40.0, NodeRemoved(40.0, "m")),
        (50.0, JobFinished(50.0, "a", "succeeded")),
        (60.0, JobCancelled(60.0, "a")),
    ):
        timeline.add(decided(at - 5.0, "started", a=on(2, "m")))
        timeline.add(loss)
        timeline.add(JobCancelled(at + 1.0, "b"))
    told = [(found.at, found.before, found.after, found.reason) for found in timeline.reallocations_of("a")]
    assert told[1::2] == [
        (20.0, 2, 0, "paused"),
        (30.0, 2, 0, "crashed"),
        (40.0, 2, 0, "node-lost"),
        (50.0, 2, 0, "succeeded"),
        (60.0, 2, 0, "cancelled"),
    ]
    assert timeline.reallocations_of("b") == [], "it held none"
    assert timeline.num_reallocations == 0


def test_what_a_change_cost(timeline):
    timeline.add(decided(10.0, a=on(2)))
    timeline.add(JobRunning(15.0, "a", 1))
    assert timeline.reallocation_cost == 0.0, "a first start changes nothing"
    timeline.add(decided(20.0, a=on(4)))
    timeline.add(JobRunning(21.0, "a", 1))
    assert timeline.reallocation_cost == 0.0, "that was told of those that left"
    timeline.add(JobRunning(26.0, "a", 2))
    assert timeline.cost_of("a") == (24.0, 1)
    timeline.add(decided(40.0, a=on(2)))
    timeline.add(JobRunning(50.0, "a", 3, pause_seconds=0.5, resize_kind="shrink"))
    assert timeline.cost_of("a") == (25.0, 2)
    assert timeline.reallocation_cost == 25.0
    assert timeline.cost_of("nobody") == (0.0, 0)


def test_the_controller_has_the_last_word(world):
    world.submit("a", min_gpus=2, max_gpus=2, time_limit_seconds=50.0)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    world.after(100.0)
    assert world.engine.job("a").state == "failed"
    desk = world.engine.views
    view = view_of(desk.timeline.changes(), 1000.0, world.clock.time, 10)
    (row,) = view["jobs"]
    ended_at = world.engine.job("a").ended_at
    assert row["intervals"][-1][1] == pytest.approx(ended_at, abs=0.1)
    assert view["capacity"][-1][1] == 4


def test_a_restart_tells_the_same_story(world):
    world.submit("a")
    world.backend.started("a")
    world.submit("b")
    world.after(10.0)
    now = world.clock.time
    before = view_of(world.engine.views.timeline.changes(), 1000.0, now, 10)
    assert len(before["jobs"]) == 2
    world.engine.pipeline.save()
    again = world.new_engine()
    again.pipeline.reconcile()
    after = view_of(again.pipeline.views.timeline.changes(), 1000.0, now, 10)
    assert after == before


def test_the_rest_is_one_line_and_areas_are_kept():
    timeline = Timeline()
    rng = random.Random(3)
    held: dict[str, list[tuple[float, int]]] = {}
    for at in range(1, 2000):
        job_id, count = f"j{rng.randrange(50)}", rng.randrange(0, 5)
        timeline.add(decided(float(at), **{job_id: on(count) if count else NOWHERE}))
        held.setdefault(job_id, []).append((float(at), count))
    until = 2000.0
    area = {
        job_id: sum(c * (end - at) for (at, c), (end, _) in zip(moves, [*moves[1:], (until, 0)], strict=True))
        for job_id, moves in held.items()
    }
    view = view_of(timeline.changes(), 0.0, until, 10)
    *top, other = view["jobs"]
    assert [row["id"] for row in top] == sorted(area, key=lambda job_id: -area[job_id])[:10]
    assert (other["id"], other["name"]) == (None, "other")
    for row in top:
        assert sum(g * (end - start) for start, end, g in row["intervals"]) == pytest.approx(area[row["id"]], rel=0.01)
    rest = sum(area.values()) - sum(area[row["id"]] for row in top)
    assert sum(g * (end - start) for start, end, g in other["intervals"]) == pytest.approx(rest, rel=0.01)
    assert other["gpu_seconds"] == pytest.approx(rest, rel=1e-6)


def test_what_is_too_short_to_be_seen_is_put_together():
    timeline = Timeline()
    for step in range(1000):
        timeline.add(decided(500.0 + step / 100, a=on(1 + 2 * (step % 2))))
    timeline.add(decided(510.0, a=on(6)))
    (row,) = view_of(timeline.changes(), 0.0, 1000.0, 5)["jobs"]
    assert len(row["intervals"]) <= 22
    assert sum(gpus * (end - start) for start, end, gpus in row["intervals"]) == pytest.approx(20 + 6 * 490, rel=1e-3)
    assert all(gpus == pytest.approx(2.0, abs=0.05) for start, _, gpus in row["intervals"] if start < 510)


def test_what_is_sent_is_bounded():
    timeline = Timeline()
    rng = random.Random(4)
    for step in range(3000):
        moves = {f"j{rng.randrange(300)}": on(rng.randrange(1, 8)) for _ in range(20)}
        timeline.add(decided(step * 28.8, **moves))
    view = view_of(timeline.changes(), 0.0, 86400.0, 200)
    shown = [row for row in view["jobs"] if row["id"] is not None]
    assert len(shown) == 200
    assert sum(len(row["intervals"]) for row in shown) <= MOST_INTERVALS
    assert len(json.dumps(view, separators=(",", ":"))) < 200_000


def test_the_older_half_goes_when_there_are_many(monkeypatch):
    monkeypatch.setattr(module, "_MOST_CHANGES", 1000)
    timeline = Timeline()
    timeline.add(decided(0.5, steady=on(3)))
    for at in range(1, 2000):
        timeline.add(decided(float(at), a=on(1 + at % 2)))
    changes = timeline.changes()
    assert len(changes.at) <= 1001
    assert list(changes.at) == sorted(changes.at)
    found = intervals(timeline, 1990.0, 2000.0)
    assert found["steady"] == [[1990, 2000, 3]]
    assert len(found["a"]) == 10


def test_an_empty_timeline():
    view = view_of(Timeline().changes(), 0.0, 10.0, 5)
    assert (view["jobs"], view["capacity"], view["reallocations"], view["num_jobs"]) == ([], [], [], 0)


def test_a_busy_cluster_does_not_push_out_the_changes_of_a_long_job(timeline, monkeypatch):
    monkeypatch.setattr("pollux.service.views.timeline._MOST_REALLOCATIONS", 50)
    timeline._reallocations = deque(maxlen=50)
    timeline.add(decided(10.0, a=on(2)))
    for step in range(100):
        timeline.add(decided(20.0 + step, b=on(1 + step % 2)))
    assert [found.after for found in timeline.reallocations_of("a")] == [2]
    assert len(timeline.reallocations_of("b")) == 100
    assert len(timeline.changes().reallocations) == 50
    for step in range(1000):
        timeline.add(decided(200.0 + step, b=on(1 + step % 2)))
    assert len(timeline.reallocations_of("b")) == 400, "bounded all the same"


def test_jobs_that_nobody_asks_for_any_more_are_not_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_CHANGES", 1000)
    monkeypatch.setattr(module, "_FEW_JOBS", 50)
    timeline = Timeline()
    timeline.add(JobSubmitted(0.0, JobSpec("steady")))
    timeline.add(decided(0.5, steady=on(3)))
    for number in range(3000):
        at, job_id = 1.0 + number, f"j{number}"
        timeline.add(JobSubmitted(at, JobSpec(job_id)))
        timeline.add(decided(at, **{job_id: on(2)}))
        timeline.add(JobCancelled(at + 0.5, job_id))
        timeline.forget(job_id)
    changes = timeline.changes()
    drawn = {changes.jobs[number] for number in changes.who}
    assert {"steady", "j2999"} <= drawn
    assert len(changes.jobs) <= 2 * (len(drawn) + 1) + 50
    assert intervals(timeline, 2990.0, 2992.0) == {
        "steady": [[2990, 2992, 3]], "j2989": [[2990, 2990.5, 2]], "j2990": [[2991, 2991.5, 2]],
    }  # fmt: skip
    timeline.add(decided(4000.0, steady=on(4)))
    assert intervals(timeline, 3999.0, 4001.0) == {"steady": [[3999, 4000, 3], [4000, 4001, 4]]}


def test_jobs_that_never_held_anything_are_not_kept_either(monkeypatch):
    monkeypatch.setattr(module, "_FEW_JOBS", 50)
    timeline = Timeline()
    for number in range(500):
        timeline.add(JobSubmitted(float(number), JobSpec(f"j{number}")))
        timeline.forget(f"j{number}")
    assert len(timeline.changes().jobs) <= 50
    timeline.add(JobSubmitted(600.0, JobSpec("last")))
    timeline.add(decided(601.0, last=on(1)))
    assert intervals(timeline, 600.0, 602.0) == {"last": [[601, 602, 1]]}
