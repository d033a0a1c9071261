"""Records that cannot be written, and ends of replicas with 0 that may not have been done; all without processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.process.records import read_record, record_path, write_record
from pollux.backends.shim.generation import Generation
from pollux.backends.shim.generation_replicas import RunningReplica
from pollux.core.errors import BackendFailed
from pollux.wire.live.messages import LaunchOrder


@pytest.fixture
def generation():
    order: Any = SimpleNamespace(
        job_id="job", generation=2, memory_bytes=0.0, grace_seconds=5.0, argv=("python",), logs="", log_cap_bytes=1
    )
    launcher: Any = SimpleNamespace(is_clear=lambda kill: True, lacks_memory=False, sweep_seconds=0.1)
    made = Generation(order, Path("nowhere"), launcher, lambda: None)
    for number in (0, 1):
        process = ReplicaProcess()
        log: Any = SimpleNamespace(tail=b"", close=lambda: None)
        made.members.append(RunningReplica(number, number, str(number), process, log, code=0))
    return made


impossible: set[Path] = set()


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A generation of two living replicas."""

    def write(path, value):
        if path in impossible:
            raise BackendFailed(f"cannot write {path}: no space")
        write_record(path, value)

    impossible.clear()
    monkeypatch.setattr("pollux.backends.shim.generation.write_record", write)

    def start(start, place, memory_bytes, sink):
        started.append(place)
        return ReplicaProcess(100 + len(started), 1)

    started: list[str] = []
    launcher: Any = SimpleNamespace(start=start, session="", is_clear=lambda kill: True, lacks_memory=False)
    made: Any = Generation(order(tmp_path, 1, "0", "1"), tmp_path, launcher, lambda: None)
    made.start()
    return made


def hinder(generation, number):
    """Make a record impossible, until `relieve`."""
    impossible.add(record_path(generation.folder, "generation", number))


def relieve(generation, number):
    impossible.remove(record_path(generation.folder, "generation", number))


def order(folder, generation, *where):
    replicas: tuple[dict[str, str], ...] = tuple({} for _ in where)
    cores = tuple((0,) for _ in where)
    gpus = dict.fromkeys(where, 0)
    return LaunchOrder("job", generation, ("true",), "/", {}, replicas, cores, where, "r", False, 1.0, 0.0, str(folder),
                       1000, True, gpus=gpus)  # fmt: skip


def written(generation, number):
    return read_record(record_path(generation.folder, "generation", number))


def test_a_joiner_is_not_started_where_that_could_not_be_noted(places):
    hinder(places, 2)
    change = places.take_order(order(places.folder, 2, "0", "1", "2"), {0: 0, 1: 1})
    assert list(change.joiners) == [2]
    with pytest.raises(BackendFailed, match="cannot write"):
        places.join(2, 2)
    assert len(places.members) == 2
    relieve(places, 2)
    places.join(2, 2)
    assert written(places, 2)["places"] == ["0", "1", "2"]


def test_a_record_of_what_came_about_is_written_later(places, monkeypatch):
    now = 0.0
    monkeypatch.setattr("pollux.backends.shim.generation.time.monotonic", lambda: now)
    hinder(places, 2)
    places.take_order(order(places.folder, 2, "0"), {0: 0, 1: 1})
    places.members[1].code = 0
    places.launcher.sweep = lambda process: None
    places.adopt_ranks({0: 0})
    assert (places.is_recorded, written(places, 2)) == (False, None)
    now = places.due()
    places.act_on_due()
    assert not places.is_recorded
    relieve(places, 2)
    now = places.due()
    places.act_on_due()
    assert places.is_recorded
    assert written(places, 2)["places"] == ["0"]
    assert places.due() is None


def test_an_order_that_waits_is_taken_where_it_cannot_be_noted_yet(places):
    hinder(places, 3)
    places.renumber(3)
    assert (places.order.generation, places.is_recorded, places.is_ending) == (3, False, False)


def test_all_that_ended_well_were_done(generation):
    generation.act_on_due()
    assert generation.ended.outcome == "succeeded"


@pytest.mark.parametrize("given_up", [False, True])
def test_one_that_left_with_what_nobody_else_has_was_not_done(generation, given_up):
    generation.doubt_success(1, "replica 1 ended without handing over what it holds")
    if given_up:
        generation.end_for_restart("replica 1 ended without handing over what it holds")
    generation.act_on_due()
    assert generation.ended.outcome == "lost"
    assert generation.ended.detail == "replica 1 ended without handing over what it holds"


def test_one_that_said_that_it_was_through_is_believed(generation):
    generation.doubt_success(1, "replica 1 ended without handing over what it holds")
    generation.believe_success()
    generation.act_on_due()
    assert generation.ended.outcome == "succeeded"


def test_one_in_doubt_that_was_told_to_stop_is_stopped(generation):
    generation.doubt_success(1, "replica 1 ended without handing over what it holds")
    generation.stop(0.0)
    generation._kill_at = None
    generation.act_on_due()
    assert generation.ended.outcome == "stopped"
