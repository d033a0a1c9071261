"""A disk that is full, or comes and goes: nothing that was acknowledged is lost, and nobody spins meanwhile."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from pollux.core import Node
from pollux.core.errors import Conflict, StoreFailed
from pollux.service.engine.decision_thread import DecisionResult
from pollux.store import MemoryStore, MemoryTelemetry
from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report
from pollux.testing.waiting import PATIENCE_SECONDS
from pollux.wire.job import JobRequest


class FullDisk(MemoryStore):
    full = False
    unreadable = False
    attempts = 0
    saves = 0

    def append(self, events):
        if self.full and events:
            self.attempts += 1
            raise StoreFailed("disk full")
        return super().append(events)

    def save(self, saved):
        self.saves += 1
        if self.full:
            raise StoreFailed("disk full")
        return super().save(saved)

    def load(self):
        if self.unreadable:
            raise StoreFailed("disk gone")
        return super().load()


class FullTelemetry(MemoryTelemetry):
    full = False

    def record(self, rows):
        if self.full:
            raise StoreFailed("disk full")
        super().record(rows)


@pytest.fixture
def store():
    return FullDisk()


@pytest.fixture
def world(make_world, store):
    return make_world(store=store)


def request(name, **fields):
    given = {"min_gpus": 1, "max_gpus": 1, "workdir": "/", **fields}
    return JobRequest(name, ("x",), **given)


def test_a_failed_snapshot_and_a_failed_fact_lose_nothing(world, store):
    world.submit("a", max_gpus=1)
    world.backend.started("a")
    world.engine.loop.wait_until_idle()
    store.full = True
    world.after(700.0)
    assert store.saves > 0, "a snapshot was due"
    with pytest.raises(StoreFailed):
        result_of(world.engine.submit(request("b")))
    assert [(status.id, status.state) for status in world.engine.jobs()] == [("a", "running")]
    assert list(world.engine.pipeline.controller.jobs) == ["a"]
    assert result_of(world.engine.status()).nodes[0].gpus == 4
    store.full = False
    with pytest.raises(Conflict, match="'a' is running; cancel"):
        result_of(world.engine.submit(request("a")))
    world.submit("b", max_gpus=1)
    assert [(launch.job_id, launch.generation) for launch in world.backend.launches] == [("a", 1), ("b", 1)]
    world.engine.stop("keep")
    world.engine = world.new_engine()
    assert list(world.engine.pipeline.controller.jobs) == ["a", "b"]


def test_a_snapshot_counts_once_it_is_written(world, store):
    world.submit("a", max_gpus=1)
    store.full = True
    world.after(700.0)
    failed = store.saves
    assert 0 < failed <= 2, "not again and again"
    store.full = False
    world.after(40.0)
    assert store.saves == failed + 1
    assert store.load().revision == store.revision


def test_a_state_that_cannot_be_read_back_is_not_worked_with(world, store):
    world.submit("a", max_gpus=1)
    store.full = store.unreadable = True
    with pytest.raises(StoreFailed):
        result_of(world.engine.submit(request("b")))
    with pytest.raises(StoreFailed, match="disk gone"):
        result_of(world.engine.status())
    store.full = store.unreadable = False
    assert result_of(world.engine.status()).jobs_by_state == {"starting": 1}
    assert result_of(world.engine.submit(request("b")))[0].id == "b"


def test_decisions_wait_longer_and_longer_for_a_full_disk(world, store):
    result_of(world.engine.submit(request("a")))
    world.engine.loop.wait_until_idle()
    result_of(world.engine.submit(request("b")))
    world.engine.loop.wait_until_idle()
    assert world.engine.job("b").state == "queued", "decisions are at least two seconds apart"
    store.full = True
    due, pauses = world.clock.time + 5.0, []
    for _ in range(7):
        before, began = store.attempts, due
        world.move(began)
        assert store.attempts == before + 1, "one attempt, then a pause"
        due = world.engine.loop.next_due()
        pauses.append(due - began)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert result_of(world.engine.status()).jobs_by_state == {"starting": 1, "queued": 1}
    store.full = False
    world.move(due)
    assert world.engine.job("b").state == "starting"


def test_a_timer_waits_for_a_full_disk_as_well(world, store):
    world.submit("a", max_gpus=1)
    world.backend.ended("a", "crashed", "x")
    world.engine.loop.wait_until_idle()
    store.full = True
    world.after(5.0)
    attempts = store.attempts
    for _ in range(20):
        world.engine.loop.wait_until_idle()
    assert store.attempts == attempts
    assert world.engine.loop.next_due() > world.clock.time
    store.full = False
    result_of(world.engine.submit(request("b")))
    world.after(3.0)
    assert [launch.job_id for launch in world.backend.launches][-2:] == ["a", "b"], (
        "a fact that was written ends the pause"
    )


def test_with_a_full_disk_it_can_be_stopped(world, store):
    world.submit("a", max_gpus=1)
    world.backend._by_itself = True
    store.full = True
    world.engine.stop("stop")
    assert world.backend.stops == [("a", 1)]


def test_who_only_looks_is_answered_whatever_the_disk_does(make_world, store):
    world = make_world(store=store)
    world.submit("a", max_gpus=1)
    telemetry = world.telemetry = FullTelemetry()
    world.engine.pipeline._telemetry = telemetry
    world.backend.started("a")
    result_of(world.engine.report("a", sample_report(1, model=SAMPLE_MODEL)))
    telemetry.full = store.full = True
    for _ in range(3):
        assert result_of(world.engine.status()).jobs_by_state == {"running": 1}
    with pytest.raises(StoreFailed):
        result_of(world.engine.report("a", sample_report(1, progress=500.0, model=SAMPLE_MODEL)))
    assert result_of(world.engine.status()).jobs_by_state == {"running": 1}


def test_what_a_backend_said_meanwhile_is_not_lost(world, store):
    world.submit("a", max_gpus=1)
    world.submit("b", max_gpus=1, retries=0)
    store.full = True
    world.backend.started("a")
    world.backend.ended("b", "crashed", "exit code 3")
    world.engine.loop.wait_until_idle()
    assert result_of(world.engine.status()).jobs_by_state == {"starting": 2}
    attempts = store.attempts
    for _ in range(20):
        world.engine.loop.wait_until_idle()
    assert store.attempts == attempts
    store.full = False
    world.after(60.0)
    assert result_of(world.engine.status()).jobs_by_state == {"running": 1, "failed": 1}


# Mistakes of ours, and of backends


def test_a_backend_that_fails_inside_holds_nobody_up(world, caplog):
    world.submit("a", max_gpus=1)
    stop = world.backend.stop

    def broken(*args):
        raise OSError(30, "Read-only file system")

    world.backend.stop = broken
    result_of(world.engine.cancel("a"))
    result_of(world.engine.submit(request("b")))
    assert "could not be executed" in caplog.text
    world.backend.stop = stop
    world.after(5.0)
    assert world.engine.job("b").state == "starting"
    assert ("a", 1) in world.backend.stops, "it was brought to what the log says"


def test_an_answer_of_the_policy_is_not_lost_with_others_of_its_turn(world, caplog, monkeypatch):
    world.submit("a", max_gpus=1)
    gate = threading.Event()
    world.engine.loop.read(lambda: gate.wait(PATIENCE_SECONDS))
    monkeypatch.setattr(world.engine.views, "project", lambda *_: 1 / 0)
    failed = world.engine.status()
    snapshot = world.engine.pipeline.controller.snapshot(world.clock.time)
    world.engine.loop._deciding_on = snapshot
    world.engine.loop._decided(DecisionResult(snapshot, None, 0.0))
    others = world.engine.status()
    gate.set()
    for ask in (failed, others):
        assert "failed inside" in str(ask.exception(30))
    monkeypatch.undo()
    world.engine.loop.wait_until_idle()
    assert world.engine.loop._deciding_on is None
    world.submit("b", max_gpus=1)
    assert world.engine.job("b").state == "starting"
    assert "requests failed" in caplog.text


def test_an_end_that_nobody_heard_of_starts_nothing_again(world):
    world.submit("a", min_gpus=1, max_gpus=4)
    generation = world.engine.job("a").generation
    world.engine.stop("keep")
    world.backend.ended("a", "succeeded")
    record = world.engine.pipeline.controller.jobs["a"]
    assert record.generation == generation
    world.backend.nodes = {"node-0": Node("node-0", 4, "cpu")}
    world.engine = world.new_engine()
    # As after a crash between the log and the backend: the log is one generation further.
    moved = world.engine.pipeline.controller.jobs["a"]
    moved.generation += 1
    world.engine.start()
    assert world.engine.job("a").state == "succeeded"
    assert len(world.backend.launches) == 1


def test_stumbling_over_and_over_is_slow(world, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    turns = []

    def stumble():
        turns.append(1)
        return 1 / 0

    monkeypatch.setattr(world.engine.pipeline, "fire_timer", stumble)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while world.engine.loop._num_failures < 3 and time.monotonic() < deadline:
        world.engine.status()
        time.sleep(0.01)
    monkeypatch.undo()
    world.engine.loop.wait_until_idle()
    assert len(turns) < 20
    assert result_of(world.engine.status()).nodes
