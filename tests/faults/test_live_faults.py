"""Rows of the table of failures of a live resize, scripted; those that need the real shim are in `test_live_rows`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pollux.testing.live import LiveSupervisor
from pollux.testing.training import load_module

SCRIPT = str(Path(__file__).parents[1] / "integration" / "agent" / "live_script.py")
LIVE = load_module(SCRIPT)
check_exact, finish = LIVE.check_exact, LIVE.finish


@pytest.fixture
def supervise(replica_server, tmp_path):
    made = []

    def start(num_replicas: int, hang_seconds: float | None = None, **arguments: Any) -> LiveSupervisor:
        supervisor = LiveSupervisor(
            replica_server,
            f"{SCRIPT}:train",
            {"folder": str(tmp_path), **arguments},
            {"POLLUX_TIMEOUT": "20"},
            hang_seconds=hang_seconds,
        )
        made.append(supervisor)
        supervisor.start(num_replicas)
        supervisor._until(lambda: True if supervisor.step() >= 3 else None, "training goes on")
        return supervisor

    yield start
    for supervisor in made:
        supervisor.close()


@pytest.mark.parametrize("phase", ["prepare", "ready"])
def test_a_joiner_that_dies_before_the_commit_is_not_missed(supervise, tmp_path, phase):
    supervisor = supervise(2, fails=[phase, [2], signal.SIGKILL])
    outcome = supervisor.resize(3)
    # A joiner may be seen ready just before it dies; then it is one that dies later.
    assert outcome == "withdrawn" or (phase == "ready" and outcome == "recovered"), supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 2
    check_exact(values)


def test_a_joiner_that_is_late_is_not_waited_for(supervise, tmp_path):
    supervisor = supervise(2, fails=["prepare", [2], signal.SIGSTOP])
    replicas = supervisor.prepare(3)
    supervisor._until(lambda: replicas[2].state == "T" or None, "the joiner hangs")
    os.kill(replicas[2].process, signal.SIGKILL)
    supervisor.withdraw(replicas, "late")
    assert supervisor.resize(3) == "done"
    check_exact(finish(supervisor, tmp_path))


@pytest.mark.parametrize(
    ("phase", "rank"),
    [("boundary", 0), ("boundary", 1), ("door", 1), ("regroup", 0), ("transfer", 0), ("transfer", 1), ("wrap", 0)],
)
def test_a_survivor_that_dies_on_the_way_is_left_behind(supervise, tmp_path, phase, rank):
    supervisor = supervise(3, fails=[phase, [rank], signal.SIGKILL])
    assert supervisor.resize(4) == "recovered", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 3, supervisor.outputs()
    check_exact(values)


@pytest.mark.parametrize("phase", ["door", "regroup", "transfer", "wrap", "first step"])
def test_a_joiner_that_dies_on_the_way_is_left_behind(supervise, tmp_path, phase):
    supervisor = supervise(2, fails=[phase, [2], signal.SIGKILL])
    assert supervisor.resize(4) == "recovered", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 3
    check_exact(values)


@pytest.mark.parametrize("phase", ["boundary", "leave"])
def test_a_replica_that_dies_while_it_leaves_is_not_missed(supervise, tmp_path, phase):
    supervisor = supervise(3, fails=[phase, [2], signal.SIGKILL])
    assert supervisor.resize(2) == "done", supervisor.outputs()
    check_exact(finish(supervisor, tmp_path))


def test_without_anybody_who_holds_the_state_the_job_starts_from_its_checkpoint(supervise, tmp_path):
    supervisor = supervise(2, fails=["transfer", [0, 1], signal.SIGKILL], checkpoint_every=0.05)
    outcome = supervisor.resize(4)
    assert outcome == "failed: no replica that holds the state is left", supervisor.outputs()
    assert [replica.run.wait(10.0)[0].exit_code for replica in supervisor.everybody[2:]] == [75, 75]
    supervisor.start(2)
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    check_exact(values)


@pytest.mark.parametrize("options", [{}, {"batchnorm": True}, {"num_workers": 1}])
def test_a_replica_killed_in_a_step_is_left_behind(supervise, tmp_path, options):
    supervisor = supervise(4, pace=0.004, **options)
    for rank in (2, 0, 1):
        time.sleep(0.1)
        supervisor.kill(rank)
        supervisor._until(lambda: supervisor.tend() if not supervisor.events else True, "the loss is seen")
        supervisor.events.clear()
        assert supervisor.settle() == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 1
    assert [pause["kind"] for pause in supervisor.pauses] == ["recover"] * 3
    if not options.get("batchnorm"):
        check_exact(values)


def test_who_took_the_step_sends_to_who_did_not(supervise, tmp_path):
    supervisor = supervise(3, parts_at=30)
    supervisor._until(lambda: supervisor.tend() if supervisor.running == 0 else True, "the loss is seen")
    assert supervisor.settle() == "done", supervisor.outputs()
    report = supervisor.pauses[-1]
    assert (report["kind"], report["step"]) == ("recover", 32)
    assert report["bytes"] > 0
    values = finish(supervisor, tmp_path)
    assert len(values) == 2
    check_exact(values)


def test_a_replica_that_hangs_is_ended_and_left_behind(supervise, tmp_path):
    supervisor = supervise(3, hang_seconds=2.5)
    supervisor.kill(1, signal.SIGSTOP)
    supervisor._until(lambda: supervisor.tend() if supervisor.running == 0 else True, "the hang is seen")
    assert supervisor.settle() == "done", supervisor.outputs()
    assert supervisor.false_alarms == 0
    values = finish(supervisor, tmp_path)
    assert len(values) == 2
    check_exact(values)


def test_when_nobody_says_how_to_go_on_the_state_is_saved_and_the_job_restarts(supervise, tmp_path):
    supervisor = supervise(3)
    supervisor._recovers = False
    supervisor.kill(0)
    supervisor._until(lambda: supervisor.members[0].is_over or None, "it is gone")
    supervisor.set("lost/0", [0])
    time.sleep(0.3)
    for rank in (1, 2):
        supervisor.kill(rank, signal.SIGTERM)
    assert [replica.run.wait(20.0)[0].exit_code for replica in supervisor.everybody] == [-9, 143, 143]
    supervisor._recovers = True
    supervisor.start(2)
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    check_exact(values)
