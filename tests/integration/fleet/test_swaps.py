"""Two jobs that are each to have places of the other."""

import sys

from pollux.backends.dispatch import changes
from pollux.backends.protocol import Launch, ReplicasStarted
from pollux.core import Placement
from pollux.testing.jobs import float64_job

# More than it can train here.
EPOCHS = 2000


class Other:
    """A second job on the backend of a run."""

    def __init__(self, run, folder):
        self.run, self.folder, self.generation = run, folder, 0
        folder.mkdir()

    def launch(self, **counts):
        self.generation += 1
        argv = (sys.executable, float64_job.__file__, str(self.folder), str(EPOCHS))
        env = {"POLLUX_JOB": "other", "POLLUX_GENERATION": str(self.generation)}
        placement, folder = Placement.of(counts), str(self.folder)
        return Launch("other", self.generation, placement, argv, folder, env, grace_seconds=40.0, live=True)

    def runs(self):
        started = [event for event in self.run.events if isinstance(event, ReplicasStarted) and event.job_id == "other"]
        return any(event.generation == self.generation for event in started)


def test_changes_that_wait_for_one_another_come_about(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "_DEADLOCK_SECONDS", 0.3)
    run = make_run(epochs=EPOCHS)
    other = Other(run, tmp_path / "other")
    run.train_on({"n0": 1, "n1": 1})
    run.backend.submit(other.launch(n0=1, n1=1))
    run.wait_for("the other's step", lambda: other.runs() and float64_job.living(other.folder, stepped=True))
    before = set(float64_job.living(other.folder))
    run.request_move({"n0": 2})
    run.backend.resize(other.launch(n1=2))
    run.await_running()
    run.wait_for("the other's change", other.runs)
    run.wait_for("its two on their node", lambda: len(run.replicas_on(0)) == len(float64_job.living(run.folder)) == 2)
    run.wait_for("the end of who has left", lambda: len(float64_job.living(other.folder)) == 2)
    assert len(before & set(float64_job.living(other.folder))) == 1, "one that waits is enough to start anew"
    run.backend.stop("other", other.generation, 0.0)
    run.wait_for("the other's end", lambda: not float64_job.living(other.folder))
