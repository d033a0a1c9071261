"""One run in Weights & Biases and in MLflow, however often a job's GPUs change: the recipes of docs/tracking.md.

Both are stood for by modules that keep what they are told, as a server of theirs would; the environment is the one that
the service gives to replicas.
"""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path

import pytest

from pollux.testing.servers.service import SAMPLE_MODEL, result_of, sample_report

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tracking.md"


def recipe(title):
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return compile(code, title, "exec")


class Wandb(types.ModuleType):
    """Reads the id and what to do with it from the environment, as the real one does."""

    def __init__(self):
        super().__init__("wandb")
        self.runs = {}
        self.current = None

    def init(self, project):
        name, resume = os.environ.get("WANDB_RUN_ID"), os.environ.get("WANDB_RESUME")
        if name is None or (name in self.runs and resume != "allow"):
            name = f"random-{len(self.runs)}"
        self.current = self.runs.setdefault(name, [])

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "samples")

    def log(self, values):
        self.current.append((values["samples"], values["loss"]))


class Mlflow(types.ModuleType):
    """Chooses ids itself; a run is found again by its tags."""

    def __init__(self):
        super().__init__("mlflow")
        self.runs, self.tags = {}, {}
        self.current = None

    def search_runs(self, filter_string, output_format):
        assert output_format == "list"
        key, value = re.fullmatch(r"tags\.(\w+) = '(.+)'", filter_string).groups()
        found = [name for name, tags in self.tags.items() if tags.get(key) == value]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=name)) for name in found]

    def start_run(self, run_id=None, tags=None):
        name = run_id or f"chosen-{len(self.runs)}"
        self.tags.setdefault(name, {}).update(tags or {})
        self.current = self.runs.setdefault(name, [])

    def log_metric(self, name, value, step):
        self.current.append((step, value))


def train(code, variables, samples, rank=0):
    """What the recipe does in one process."""
    job = types.SimpleNamespace(samples=samples)
    loss = types.SimpleNamespace(item=lambda: 1.0 / samples)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_RUN_ID", "WANDB_RESUME", "POLLUX_RUN_ID"):
            patch.delenv(name, raising=False)
        for name, value in {**variables, "RANK": str(rank)}.items():
            patch.setenv(name, value)
        exec(code, {"os": os, "job": job, "loss": loss})


def generations(world):
    """The environments of one job's processes: before and after a change of its GPUs, a restart, and a crash."""
    job_id = world.submit("train", min_gpus=1, max_gpus=2)
    world.backend.started(job_id)
    world.engine.loop.wait_until_idle()
    result_of(world.engine.report(job_id, sample_report(1, model=SAMPLE_MODEL, total_progress=1e6, progress=2e5)))
    yield "started"
    result_of(world.engine.resize(job_id, 4, 4))
    world.after(100.0)
    assert world.backend.launches[-1].placement.num_gpus == 4
    world.backend.started(job_id)
    world.engine.loop.wait_until_idle()
    yield "resized"
    world.engine.stop("keep")
    world.engine = world.new_engine()
    world.engine.start()
    world.backend.ended(job_id, "crashed")
    world.after(1000.0)
    yield "crashed under a service that was restarted"


@pytest.mark.parametrize(("title", "module"), [("Weights & Biases", Wandb), ("MLflow", Mlflow)])
def test_one_run_through_a_change_of_gpus_a_restart_and_a_crash(world, monkeypatch, title, module):
    tracker = module()
    monkeypatch.setitem(sys.modules, tracker.__name__, tracker)
    code = recipe(title)
    launched = []
    for number, _ in enumerate(generations(world)):
        launch = world.backend.launches[-1]
        launched.append(launch.generation)
        for rank in range(launch.placement.num_gpus):
            train(code, launch.env, 100 * (number + 1), rank)
    assert launched == sorted(set(launched)), "other processes each time"
    assert len(launched) == 3
    (curve,) = tracker.runs.values()
    assert [samples for samples, _ in curve] == [100, 200, 300], "replica 0 writes, one curve"
    result_of(world.engine.cancel("train"))
    world.backend.ended("train", "stopped")
    other = world.submit("other", max_gpus=1)
    world.after(100.0)
    launch = next(launch for launch in reversed(world.backend.launches) if launch.job_id == other)
    train(code, launch.env, 1)
    assert len(tracker.runs) == 2, "another job is another run"
    train(code, {}, 1)
    train(code, {}, 1)
    assert len(tracker.runs) == 4, "without the service every start is a run of its own"
