"""Changes after which a job has none of its places any more, in living processes all the same."""

import sys
import time

import pytest

from pollux.backends.dispatch import changes
from pollux.backends.protocol import Launch, ReplicasStarted
from pollux.core import Placement
from pollux.testing.jobs import float64_job

EPOCHS = 34


def check(run, restarts=0):
    verdict = run.finish()
    assert verdict.exact
    assert (verdict.samples_lost, verdict.samples_repeated) == (0, 0)
    assert verdict.largest_difference < 1e-11
    assert len(verdict.restarts) == restarts, verdict.restarts


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.long), 2])
def test_all_replicas_go_to_another_node(make_run, gpus):
    run = make_run(epochs=EPOCHS)
    run.train_on({"n0": gpus})
    before = set(float64_job.living(run.folder))
    run.move_to({"n1": gpus})
    run.wait_for("the end of who has left", lambda: not before & set(float64_job.living(run.folder)))
    assert (len(run.replicas_on(1)), len(float64_job.living(run.folder))) == (gpus, gpus)
    # And back, to places that are free again.
    run.move_to({"n0": gpus})
    assert [kind for kind, _ in run.pauses] == ["move", "move"]
    assert not run.losses
    check(run)


class Other:
    """A second job on the backend of a run."""

    def __init__(self, run, folder):
        self.run, self.folder, self.generation = run, folder, 0
        folder.mkdir()

    def launch(self, **counts):
        self.generation += 1
        # More than it can train here.
        argv = (sys.executable, float64_job.__file__, str(self.folder), "2000")
        env = {"POLLUX_JOB": "other", "POLLUX_GENERATION": str(self.generation)}
        placement, folder = Placement.of(counts), str(self.folder)
        return Launch("other", self.generation, placement, argv, folder, env, grace_seconds=40.0, live=True)

    def started(self):
        """How its newest generation began; None before it has."""
        told = [event for event in self.run.events if isinstance(event, ReplicasStarted) and event.job_id == "other"]
        return next((event for event in told if event.generation == self.generation), None)

    def begin(self, **counts):
        self.run.backend.submit(self.launch(**counts))
        self.run.wait_for("the other's step", lambda: self.started() and float64_job.living(self.folder, stepped=True))

    def end(self):
        self.run.backend.stop("other", self.generation, 0.0)
        self.run.wait_for("the other's end", lambda: not float64_job.living(self.folder))


def test_who_comes_waits_until_another_job_has_left_its_places(make_run, tmp_path):
    run = make_run(epochs=EPOCHS)
    other = Other(run, tmp_path / "other")
    run.train_on({"n0": 2})
    other.begin(n1=2)
    before = float64_job.living(run.folder)
    run.request_move({"n1": 2})
    calm = time.monotonic() + 1.0
    run.wait_for("moment", lambda: time.monotonic() > calm)
    assert (float64_job.living(run.folder), run.replicas_on(1)) == (before, []), "no two on one place"
    run.backend.resize(other.launch(n2=2))
    run.await_running()
    run.wait_for("the other's move", other.started)
    assert (other.started().kind, [kind for kind, _ in run.pauses]) == ("move", ["move"])
    other.end()
    check(run)


def test_two_jobs_that_change_places_come_about_by_one_restart(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "_DEADLOCK_SECONDS", 0.3)
    run = make_run(epochs=EPOCHS)
    other = Other(run, tmp_path / "other")
    run.train_on({"n0": 2})
    other.begin(n1=2)
    run.request_move({"n1": 2})
    run.backend.resize(other.launch(n0=2))
    run.await_running()
    run.wait_for("the other's move", other.started)
    run.wait_for("its two on their node", lambda: len(run.replicas_on(1)) == len(float64_job.living(run.folder)) == 2)
    run.wait_for("the end of who has left", lambda: len(float64_job.living(other.folder)) == 2)
    assert (other.started().kind, run.pauses) == ("move", []), (
        "the first saves and starts anew, which lets the other move"
    )
    other.end()
    check(run)
