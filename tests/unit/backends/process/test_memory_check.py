"""How often a job's memory is compared with its limit; by a clock that the test moves."""

from typing import Any

import pytest

from pollux.backends.process.launcher import ReplicaProcess
from pollux.backends.process.memory_check import MemoryCheck

REPLICAS = {0: ReplicaProcess(1), 1: ReplicaProcess(2)}


class Launcher:
    """Says what it is told to say, and takes `seconds` for it."""

    def __init__(self, now):
        self.now, self.seconds, self.answer, self.asked = now, 0.0, None, []

    def over_memory(self, processes, limit):
        self.asked.append((sorted(processes), limit))
        self.now[0] += self.seconds
        return self.answer


@pytest.fixture
def launcher(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("pollux.backends.process.memory_check.time.monotonic", lambda: now[0])
    made: Any = Launcher(now)
    return made


def test_without_a_limit_nothing_is_checked(launcher):
    check = MemoryCheck(launcher)
    assert (check.due, check.find_excess(REPLICAS)) == (None, None)
    assert launcher.asked == []


def test_a_replica_above_the_limit_is_found(launcher):
    check = MemoryCheck(launcher, 10.0)
    launcher.answer = (1, 12.0)
    assert check.find_excess(REPLICAS) == (1, 12.0)
    assert launcher.asked == [([0, 1], 10.0)]


def test_four_checks_a_second_where_they_take_no_time(launcher):
    check = MemoryCheck(launcher, 10.0)
    check.find_excess(REPLICAS)
    assert check.due == 100.25
    launcher.answer = (0, 11.0)
    assert check.find_excess(REPLICAS) is None, "it is not due"
    launcher.now[0] = 100.25
    assert check.find_excess(REPLICAS) == (0, 11.0)


def test_a_long_check_takes_a_twentieth_of_the_time(launcher):
    check = MemoryCheck(launcher, 10.0)
    launcher.seconds = 2.0
    check.find_excess(REPLICAS)
    assert check.due == 140.0


def test_the_next_check_is_later_also_where_nothing_runs(launcher):
    check = MemoryCheck(launcher, 10.0)
    assert check.find_excess({}) is None
    assert check.due == 100.25
