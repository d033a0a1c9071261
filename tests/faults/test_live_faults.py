"""Rows of the table of failures of a live resize, scripted; those that need the real shim are in `test_live_rows`."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.live_supervisor import LiveSupervisor

from pollux.agent.checkpoint.manifest import read_manifest, verify_files
from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS

SCRIPT = str(Path(__file__).parents[1] / "integration" / "agent" / "live_script.py")
LIVE = load_module(SCRIPT)
LONG = pytest.mark.long
check_exact, finish = LIVE.check_exact, LIVE.finish


@pytest.fixture
def supervise(replica_server, tmp_path):
    made = []

    def start(num_replicas: int, hang_seconds: float | None = None, **arguments: Any) -> LiveSupervisor:
        supervisor = LiveSupervisor(
            replica_server,
            f"{SCRIPT}:train",
            {"folder": str(tmp_path), **arguments},
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
    [
        ("boundary", 0),
        ("regroup", 0),
        ("transfer", 1),
        *(pytest.param(*each, marks=LONG) for each in (("boundary", 1), ("door", 1), ("transfer", 0), ("wrap", 0))),
    ],
)
def test_a_survivor_that_dies_on_the_way_is_left_behind(supervise, tmp_path, phase, rank):
    supervisor = supervise(3, fails=[phase, [rank], signal.SIGKILL])
    assert supervisor.resize(4) == "recovered", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 3, supervisor.outputs()
    check_exact(values)


@pytest.mark.parametrize(
    "phase", ["door", "transfer", *(pytest.param(each, marks=LONG) for each in ("regroup", "wrap", "first step"))]
)
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
    assert [replica.run.wait(PATIENCE_SECONDS)[0].exit_code for replica in supervisor.everybody[2:]] == [75, 75]
    supervisor.start(2)
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    check_exact(values)


@pytest.mark.parametrize("options", [pytest.param({}, marks=LONG), {"batchnorm": True}, {"num_workers": 1}])
def test_a_replica_killed_in_a_step_is_left_behind(supervise, tmp_path, options):
    supervisor = supervise(4, pace=0.004, **options)
    for rank in (2, 0, 1):
        time.sleep(0.1)
        supervisor.kill(rank)
        supervisor._until(lambda: supervisor.replace_lost() if not supervisor.events else True, "the loss is seen")
        supervisor.events.clear()
        assert supervisor.await_change() == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 1
    assert [pause["kind"] for pause in supervisor.pauses] == ["recover"] * 3
    if not options.get("batchnorm"):
        check_exact(values)


def test_who_took_the_step_sends_to_who_did_not(supervise, tmp_path):
    supervisor = supervise(3, parts_at=30)
    supervisor._until(lambda: supervisor.replace_lost() if supervisor.running == 0 else True, "the loss is seen")
    assert supervisor.await_change() == "done", supervisor.outputs()
    report = supervisor.pauses[-1]
    assert (report["kind"], report["step"]) == ("recover", 32)
    assert report["bytes"] > 0
    values = finish(supervisor, tmp_path)
    assert len(values) == 2
    check_exact(values)


@pytest.mark.parametrize("batchnorm", [pytest.param(False, marks=LONG), True])
def test_a_replica_that_hangs_is_ended_and_left_behind(supervise, tmp_path, batchnorm):
    # With BatchNorm the others are held up in their forward pass.
    supervisor = supervise(3, hang_seconds=20.0, batchnorm=batchnorm)
    supervisor.kill(1, signal.SIGSTOP)
    supervisor._until(lambda: supervisor.replace_lost() if supervisor.running == 0 else True, "the hang is seen")
    assert supervisor.await_change() == "done", supervisor.outputs()
    assert supervisor.false_alarms == 0, supervisor.events
    values = finish(supervisor, tmp_path)
    assert len(values) == 2
    if not batchnorm:
        check_exact(values)


def test_a_dead_lock_in_the_scripts_own_code_is_seen_though_its_threads_live(supervise, tmp_path):
    supervisor = supervise(3, hang_seconds=20.0, hangs_at=20)
    hung = supervisor.members[1]
    supervisor._until(lambda: supervisor.replace_lost() if supervisor.running == 0 else True, "the hang is seen")
    assert supervisor.await_change() == "done", supervisor.outputs()
    assert (tmp_path / f"hangs-{hung.process}").exists()
    assert supervisor.events[0] == "lost [1] of generation 0" or "rank 1" in supervisor.events[0]
    values = finish(supervisor, tmp_path)
    assert len(values) == 2, supervisor.events
    check_exact(values)


def whole(folder: Path) -> list[int]:
    """The steps of all checkpoints that are published there; an error where one of them is not whole."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    for path in paths:
        verify_files(path, read_manifest(path).files, from_disk=True)
    return [read_manifest(path).step for path in paths]


@pytest.mark.parametrize("how", ["grow", "replica 0 leaves", "replica 0 dies"])
def test_a_change_while_a_checkpoint_is_written(supervise, tmp_path, how):
    (tmp_path / "slow").touch()
    supervisor = supervise(2, saves_at=6)
    first = supervisor.members[0]
    supervisor._until(lambda: (tmp_path / f"writing-{first.process}").exists() or None, "a checkpoint is written")
    if how == "replica 0 dies":
        supervisor.kill(0)
        supervisor._until(lambda: supervisor.replace_lost() if supervisor.running == 0 else True, "the loss is seen")
        assert supervisor.await_change() == "done", supervisor.outputs()
    else:
        outcome = supervisor.resize(3) if how == "grow" else supervisor.resize(1, keep=[1])
        assert outcome == "done", supervisor.outputs()
    # All of the change went by while it was being written: nothing of it is there yet, and nothing half.
    assert whole(tmp_path) == []
    assert first.is_over == (how == "replica 0 dies")
    (tmp_path / "slow").unlink()
    if how == "replica 0 leaves":
        assert first.run.wait(PATIENCE_SECONDS)[0].exit_code == 0
    if how != "replica 0 dies":
        supervisor._until(lambda: 6 in whole(tmp_path) or None, "it is published")
    values = finish(supervisor, tmp_path)
    check_exact(values)
    assert whole(tmp_path)[-1] == values[0]["steps"], "whoever holds the folder now has saved the end"


def test_a_change_that_nobody_comes_to_is_withdrawn_after_the_commit(supervise, tmp_path):
    supervisor = supervise(2, hold=1, pace=0.002)
    supervisor._until(lambda: (tmp_path / "held").exists() or None, "the script is at something of its own")
    before = supervisor.members
    replicas = supervisor.prepare(3)
    assert supervisor.await_ready(replicas)
    supervisor.commit(replicas)
    key = f"here/{supervisor.generation}/2"
    supervisor._until(lambda: supervisor._text(key) is not None or None, "the joiner is at the door")
    supervisor.members, supervisor.running = before, 0
    supervisor.withdraw(replicas, "no replica came to a step's end")
    assert supervisor.everybody[2].run.wait(PATIENCE_SECONDS)[0].exit_code == 0
    (tmp_path / "go").touch()
    assert supervisor.resize(3) == "done", supervisor.outputs()
    values = finish(supervisor, tmp_path)
    assert len(values) == 3
    assert values[0]["events"].count("resized") == 1, "nobody went to the one before"
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
    assert [replica.run.wait(PATIENCE_SECONDS)[0].exit_code for replica in supervisor.everybody] == [-9, 143, 143]
    supervisor._recovers = True
    supervisor.start(2)
    values = finish(supervisor, tmp_path)
    assert values[0]["began"] > 0
    check_exact(values)
