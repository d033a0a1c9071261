"""Run time is counted by a clock that nobody moves, and outlives whoever counts it."""

from __future__ import annotations

import json

import pytest

from pollux.backends.process.records import record_path, remove_records, write_record
from pollux.backends.process.run_time import RunClock, ran_seconds


class Machine:
    def __init__(self, monkeypatch):
        self.now, self.boot = 1000.0, "boot-1"
        monkeypatch.setattr("pollux.backends.process.run_time.time.monotonic", lambda: self.now)
        monkeypatch.setattr("pollux.backends.process.run_time.boot_id", lambda: self.boot)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_nothing_is_known_of_what_never_ran(tmp_path, machine):
    assert ran_seconds(tmp_path, 1) is None
    clock = RunClock(tmp_path)
    clock.note(None)
    assert clock.due is None
    assert ran_seconds(tmp_path, 1) is None


def test_it_goes_on_while_the_generation_runs(tmp_path, machine):
    clock = RunClock(tmp_path)
    clock.note(1)
    assert ran_seconds(tmp_path, 1) == 0.0
    machine.now += 42.5
    assert ran_seconds(tmp_path, 1) == 42.5, "between two records, too"
    assert clock.due == 1060.0
    clock.note(None)
    machine.now += 100.0
    assert ran_seconds(tmp_path, 1) == 42.5
    assert clock.due is None


def test_each_generation_has_its_own(tmp_path, machine):
    clock = RunClock(tmp_path)
    clock.note(1)
    machine.now += 10.0
    clock.note(2)
    machine.now += 5.0
    assert (ran_seconds(tmp_path, 1), ran_seconds(tmp_path, 2)) == (10.0, 5.0)


def test_after_a_start_of_the_machine_the_last_record_counts(tmp_path, machine):
    clock = RunClock(tmp_path)
    clock.note(1)
    for _ in range(5):
        machine.now += 30.0
        clock.note(1)
    machine.now, machine.boot = 20.0, "boot-2"
    assert ran_seconds(tmp_path, 1) == 120.0
    again = RunClock(tmp_path)
    again.note(1)
    machine.now += 7.0
    assert ran_seconds(tmp_path, 1) == 127.0


def test_a_shim_that_was_killed_counts_no_more(tmp_path, machine):
    RunClock(tmp_path).note(1)
    machine.now += 30.0
    write_record(record_path(tmp_path, "ended", 1), {})
    assert ran_seconds(tmp_path, 1) == 0.0


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"seconds": "x"}', '{"seconds": NaN}', '{"seconds": -1.0}'])
def test_what_cannot_be_read_is_not_known(tmp_path, machine, record):
    record_path(tmp_path, "ran", 1).write_text(record)
    assert ran_seconds(tmp_path, 1) is None


def test_a_folder_that_is_gone_stops_nothing(tmp_path, machine):
    clock = RunClock(tmp_path / "gone")
    clock.note(1)
    machine.now += 100.0
    clock.note(1)
    assert clock.due > machine.now


def test_records_go_with_the_others(tmp_path, machine):
    RunClock(tmp_path).note(1)
    assert json.loads(record_path(tmp_path, "ran", 1).read_text())["boot"] == "boot-1"
    remove_records(tmp_path, before=2)
    assert ran_seconds(tmp_path, 1) is None
