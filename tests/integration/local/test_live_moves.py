"""A real job all of whose replicas go to other places while it trains, and what may happen to it on the way.

A backend of one machine never asks that of a job; here its ground is made to.
"""

import os
import signal
from typing import Any

import pytest
from tests.support.live_backend import SharedBackend, check_exact

from pollux.backends.dispatch.slots import LocalSlotAllocator
from pollux.backends.local import LocalBackend
from pollux.backends.protocol import ReplicasEnded
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.random_changes import EventRun
from pollux.testing.waiting import wait_until

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
EPOCHS = 14


@pytest.fixture(scope="module", autouse=True)
def elsewhere():
    """Whatever a job has, a change gives it other places."""
    plain = LocalSlotAllocator.allocate

    def take(self, job, placement, kept, busy):
        return plain(self, job, placement, (), busy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalSlotAllocator, "allocate", take)
        yield


@pytest.fixture(scope="module")
def local(tmp_path_factory, elsewhere):
    listeners: list[Any] = []
    backend = LocalBackend(tmp_path_factory.mktemp("home"), slots=4, hang_seconds=2.5)
    backend.start(lambda event: [listener(event) for listener in listeners])
    yield SharedBackend(backend, listeners)
    backend.close()


@pytest.fixture
def job(local, tmp_path, request):
    """Makes a job of so many replicas that trains; ends it with the test."""
    made = []

    def start(gpus, make=lambda: local, **env):
        number = f"job-{abs(hash(request.node.name)) % 10**8}"
        run = EventRun(make, tmp_path / "job", EPOCHS, env={**float64_job.SLOW, **env}, job_id=number)
        made.append(run)
        wait_until("warm backend", lambda: run.backend.is_warm)
        run.start(gpus)
        run.await_running()
        run.await_step()
        return run

    yield start
    for run in made:
        run.close()


def places(run):
    """Of the generation that runs."""
    return run.backend._dispatcher.table.jobs[run.job_id].now.places


def codes(run):
    """How the replicas of the first generation that failed ended."""
    ended = next(event for event in run.events if isinstance(event, ReplicasEnded))
    return [each.code for each in ended.exits]


@pytest.mark.parametrize(
    ("before", "after", "kind"), [pytest.param(1, 1, "move", marks=pytest.mark.long), (2, 2, "move"), (1, 3, "grow")]
)
def test_a_job_goes_to_other_places_in_one_pause(job, before, after, kind):
    run = job(before)
    processes, had = set(float64_job.living(run.folder)), set(places(run))
    run.resize(after)
    run.await_running()
    assert not had & set(places(run))
    assert not processes & set(float64_job.living(run.folder)), "who has left is gone when that is told"
    assert [each for each, _ in run.pauses] == [kind]
    assert not run.losses
    check_exact(run)


def test_there_and_back_and_once_more(job):
    run = job(2)
    for _ in range(3):
        run.resize(2)
    run.await_running()
    assert (run.generation, run.restarts, run.losses) == (4, [], [])
    check_exact(run)


@pytest.mark.parametrize("phase", ["prepare", pytest.param("transfer", marks=pytest.mark.long), "first step"])
def test_where_one_that_comes_dies_those_that_were_to_leave_save(job, phase):
    run = job(1, POLLUX_FAIL_AT=f"{phase}/0/{KILL}")
    run.resize(1)
    run.await_running()
    assert run.restarts[0].startswith("lost: joining replica 0 ended"), run.story()
    assert codes(run)[0] == 143, "it says that it was stopped, which it does when it has saved"
    check_exact(run, restarts=1)


def test_where_the_only_one_that_holds_the_state_dies_the_job_starts_from_its_checkpoint(job):
    run = job(1, POLLUX_FAIL_AT=f"transfer/1/{KILL}")
    run.wait_for("checkpoint", lambda: any((run.folder / "checkpoints").glob("step-*")) or None)
    run.resize(1)
    run.await_running()
    assert run.restarts == ["lost: replica 0 was killed by signal 9"], run.story()
    check_exact(run, restarts=1)


@pytest.mark.parametrize(
    ("phase", "number", "sent"),
    [("transfer", 2, KILL), pytest.param("boundary", 0, KILL, marks=pytest.mark.long), ("transfer", 1, STOP)],
)
def test_where_one_of_several_fails_another_saves(job, phase, number, sent):
    run = job(2, POLLUX_FAIL_AT=f"{phase}/{number}/{sent}")
    run.resize(2)
    run.await_running()
    assert run.restarts[0].startswith("lost: "), run.story()
    assert 143 in codes(run)
    check_exact(run, restarts=1)


@pytest.mark.parametrize("phase", ["door", "first step"])
def test_a_request_to_stop_midway_is_obeyed_after_saving(job, phase):
    run = job(1, POLLUX_FAIL_AT=f"{phase}/0/{STOP}")
    run.resize(1)
    run.wait_for("joiner that hangs", lambda: (run.folder / "failed-0").exists())
    run.backend.stop(run.job_id, run.generation, 40.0)
    run.wait_for("end", lambda: run.restarts)
    assert run.restarts == ["stopped: "]
    assert codes(run)[0] == 143
    run.await_running()
    check_exact(run, restarts=1)


def test_a_service_that_ends_midway_is_followed_by_one_that_learns_of_the_move(job, tmp_path):
    run = job(2, make=lambda: LocalBackend(tmp_path / "home", slots=4), POLLUX_FAIL_AT=f"prepare/1/{STOP}")
    before = set(float64_job.living(run.folder))
    run.resize(2)
    run.wait_for("joiner that hangs", lambda: (run.folder / "failed-1").exists())
    run.backend.close()
    run.backend = run._make()
    run.backend.start(run._collect_event)
    for pid in set(float64_job.living(run.folder)) - before:
        os.kill(pid, signal.SIGCONT)
    run.await_running()
    assert (len(places(run)), before & set(float64_job.living(run.folder))) == (2, set())
    assert not run.restarts
    check_exact(run)
