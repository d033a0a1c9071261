"""Rows of the table of failures of a live resize that need the real shim and its store; others: `test_live_faults`."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.live_backend import SharedBackend, check_exact

from pollux.backends.local import LocalBackend
from pollux.backends.protocol import ReplicasEnded
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.random_changes import EventRun
from pollux.testing.waiting import wait_until

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
EPOCHS = 8


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    listeners: list[Any] = []
    backend = LocalBackend(home, slots=4, hang_seconds=2.5)
    backend.start(lambda event: [listener(event) for listener in listeners])
    shared = SharedBackend(backend, listeners)
    wait_until("warm backend", lambda: backend.is_warm)
    shared.home = home
    yield shared
    backend.close()


@pytest.fixture
def job(local, tmp_path, request):
    """Makes a job of so many replicas that trains; ends it with the test."""
    made = []

    def start(gpus, steps=True, **env):
        number = f"job-{abs(hash(request.node.name)) % 10**8}"
        run = EventRun(lambda: local, tmp_path / "job", EPOCHS, env={**float64_job.SLOW, **env}, job_id=number)
        made.append(run)
        run.start(gpus)
        run.await_running()
        if steps:
            run.await_step()
        return run

    yield start
    for run in made:
        run.close()


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def store_host(local, run):
    """The process beside the replicas below the job's shim."""
    shim = json.loads((local.home / "run" / run.job_id / "shim.json").read_text())["pid"]
    replicas = float64_job.living(run.folder)
    (host,) = [pid for pid in children(shim) if pid not in replicas]
    return host


@pytest.mark.parametrize(
    ("phase", "rank", "sent"),
    [
        ("prepare", 2, KILL),
        pytest.param("boundary", 1, KILL, marks=pytest.mark.long),
        pytest.param("transfer", 0, KILL, marks=pytest.mark.long),
        ("first step", 1, KILL),
        ("boundary", 1, STOP),
        pytest.param("transfer", 0, STOP, marks=pytest.mark.long),
    ],
)
def test_who_fails_on_the_way_is_left_behind(job, phase, rank, sent):
    run = job(2, POLLUX_FAIL_AT=f"{phase}/{rank}/{sent}")
    run.resize(3)
    run.await_running()
    assert len(run.losses) == 1, run.story()
    check_exact(run)


def test_without_anybody_who_holds_the_state_the_job_starts_from_its_checkpoint(job):
    run = job(2, POLLUX_FAIL_AT=f"transfer/0,1/{KILL}")
    run.wait_for("checkpoint", lambda: any((run.folder / "checkpoints").glob("step-*")) or None)
    run.resize(4)
    run.await_running()
    check_exact(run, restarts=1)


def test_without_its_store_a_job_trains_on_and_is_saved_and_restarted_when_it_is_to_change(local, job):
    run = job(2)
    before = float64_job.living(run.folder)
    os.kill(store_host(local, run), KILL)
    calm = time.monotonic() + 1.0
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert float64_job.living(run.folder) == before, "nobody is to notice"
    run.resize(3)
    run.wait_for("end", lambda: run.restarts)
    assert "store has ended" in run.restarts[0]
    (ended,) = [event for event in run.events if isinstance(event, ReplicasEnded)]
    assert [each.code for each in ended.exits] == [143, 143], "one saves, and both say that they were stopped"
    run.await_running()
    check_exact(run, restarts=1)


def test_an_order_right_after_one_that_is_withdrawn_has_the_places_of_those_that_never_came(job):
    run = job(2, POLLUX_FAIL_AT=f"prepare/2/{KILL}")
    run.resize(4)
    wait_until("joiner that fails", (run.folder / "failed-2").exists, pause_seconds=0.005)
    # Nobody has answered the loss yet: the service had decided on something else meanwhile.
    run.resize(4)
    run.await_running()
    assert run.generation == 3
    assert not run.losses
    check_exact(run)


def test_a_store_that_goes_while_they_change_means_a_restart(local, job):
    run = job(2, POLLUX_FAIL_AT=f"prepare/2/{STOP}")
    run.resize(3)
    run.wait_for("joiner that hangs", lambda: (run.folder / "failed-2").exists())
    os.kill(store_host(local, run), KILL)
    run.await_running()
    assert "store" in run.restarts[0]
    check_exact(run, restarts=1)


def test_a_change_during_the_first_step_and_another_at_once(job):
    run = job(1, steps=False)
    run.resize(3)
    run.resize(2)
    run.await_running()
    check_exact(run)


def test_to_one_replica_and_back_while_checkpoints_are_written(job):
    run = job(3)
    for gpus in (1, 3, 1, 2):
        run.resize(gpus)
        run.await_running()
    assert [kind for kind, _ in run.pauses] == ["shrink", "grow", "shrink", "grow"]
    check_exact(run)


def test_a_change_while_the_script_is_busy_between_two_passes_waits_for_it(job):
    run = job(2, POLLUX_HOLD_AT="3")
    run.wait_for("hold", lambda: len([*run.folder.glob("held-*")]) == 2)
    run.resize(3)
    # Longer than a replica may be silent: it computes, and that is seen.
    calm = time.monotonic() + 3.0
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert run.state == "moving"
    (run.folder / "go").touch()
    run.await_running()
    assert not run.losses
    check_exact(run)


def test_data_that_does_not_come_for_long_is_no_hang(job):
    run = job(2)
    (run.folder / "stall").touch()
    run.wait_for("stall", lambda: [*run.folder.glob("stalled-*")])
    before = float64_job.living(run.folder)
    # Twice as long as a replica may be silent.
    calm = time.monotonic() + 5.0
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert float64_job.living(run.folder) == before
    (run.folder / "stall").unlink()
    run.resize(3)
    run.await_running()
    assert not run.losses
    check_exact(run)


def test_a_pause_of_all_of_a_job_ends_none_of_it(local, job):
    run = job(2)
    shim = json.loads((local.home / "run" / run.job_id / "shim.json").read_text())["pid"]
    everybody = [store_host(local, run), *float64_job.living(run.folder), shim]
    for pid in everybody:
        os.kill(pid, STOP)
    try:
        calm = time.monotonic() + 5.0
        run.wait_for("moment", lambda: time.monotonic() > calm)
    finally:
        # The shim first: it must not take silence for more than it could hear.
        for pid in reversed(everybody):
            os.kill(pid, signal.SIGCONT)
    calm = time.monotonic() + 1.0
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert sorted(float64_job.living(run.folder)) == sorted(everybody[1:3])
    assert not run.losses
    check_exact(run)


@pytest.mark.parametrize("gpus", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_change_after_the_last_step_leaves_the_script_alone(job, gpus):
    run = job(2, POLLUX_HOLD_AT=str(EPOCHS))
    (run.folder / "fast").touch()
    run.wait_for("end of training", lambda: len([*run.folder.glob("through-*")]) == 2)
    before = float64_job.living(run.folder)
    run.resize(gpus)
    calm = time.monotonic() + 1.5
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert (run.state, float64_job.living(run.folder)) == ("moving", before)
    (run.folder / "go").touch()
    run.wait_for("end", lambda: run.state == "done")
    check_exact(run)


def test_a_request_to_stop_frees_those_that_wait_at_the_door(job):
    run = job(2, POLLUX_FAIL_AT=f"door/2/{STOP}")
    run.resize(3)
    run.wait_for("joiner that hangs", lambda: (run.folder / "failed-2").exists())
    began = time.monotonic()
    run.backend.stop(run.job_id, run.generation, 40.0)
    run.wait_for("end", lambda: run.restarts)
    assert run.restarts == ["stopped: "]
    saved = [int(path.name.split("-")[1]) for path in (run.folder / "checkpoints").glob("step-*")]
    assert saved
    assert time.monotonic() - began < 39.0, "they were killed, not freed"
    run.await_running()
    check_exact(run, restarts=1)


def saver(run):
    """The process that holds the checkpoint folder, which is that of replica 0."""
    return int((run.folder / "checkpoints" / ".lock").read_text().split()[1])


def test_one_that_hangs_while_all_train_is_left_behind(job):
    run = job(3)
    victim = next(pid for pid in float64_job.living(run.folder) if pid != saver(run))
    os.kill(victim, STOP)
    run.wait_for("loss", lambda: run.losses)
    assert "hung" in run.losses[0]
    run.await_running()
    check_exact(run)


def test_where_replica_0_dies_after_the_order_to_stop_the_next_one_saves(job):
    run = job(3)
    first = saver(run)
    # It comes to no boundary any more, so that nobody can have saved before it is gone.
    os.kill(first, STOP)
    run.state = "moving"
    run.backend.stop(run.job_id, run.generation, 40.0)
    asked = time.monotonic() + 0.5
    run.wait_for("moment", lambda: time.monotonic() > asked)
    os.kill(first, KILL)
    run.wait_for("end", lambda: run.restarts)
    (ended,) = [event for event in run.events if isinstance(event, ReplicasEnded)]
    assert sorted(each.code for each in ended.exits) == [-9, 143, 143]
    newest = max((run.folder / "checkpoints").glob("step-*"))
    assert json.loads((newest / "pollux.json").read_text())["num_replicas"] == 1, "saved by one that was left"
    run.await_running()
    check_exact(run, restarts=1)
