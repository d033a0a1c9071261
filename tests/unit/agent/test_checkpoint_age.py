"""How old the last checkpoint is, as reports say: of whichever process made it."""

import datetime
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.checkpoint import checkpointer
from pollux.agent.checkpoint.folder import last_created
from pollux.agent.checkpoint.manifest import created_at
from pollux.agent.distributed.environment import Environment

HOUR = 3600.0


@pytest.fixture
def hour_ago(monkeypatch):
    """Let checkpoints be an hour old when they are made."""

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) - datetime.timedelta(seconds=HOUR)

    stand_in = SimpleNamespace(datetime=Then, UTC=datetime.UTC)
    monkeypatch.setattr(checkpointer, "datetime", stand_in)


def start(folder: Any, **options: Any) -> Any:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(4, 2))
    return pollux.init(model, torch.optim.SGD(model.parameters(), lr=0.1), data, 2, checkpoint_dir=folder, **options)


def age(job: Any) -> float | None:
    seconds: float | None = job._run.record.reports._report(RoundReport(None, None), False).checkpoint_age_seconds
    return seconds


def test_after_a_resume_it_is_that_of_what_was_resumed_from(tells, hour_ago, tmp_path):
    with start(tmp_path) as job:
        assert age(job) is None
        job.checkpoint()
        assert age(job) < HOUR / 2
    with start(tmp_path) as job:
        assert HOUR <= age(job) < 2 * HOUR
        job.checkpoint()
        assert age(job) < HOUR / 2


@pytest.mark.parametrize("was_first", [False, True])
def test_who_becomes_replica_0_finds_the_last_one_there_is(tells, hour_ago, tmp_path, was_first):
    with start(tmp_path / "there") as job:
        job.checkpoint()
        parts = job._parts
        parts.member = SimpleNamespace(membership=SimpleNamespace(ranks={0: 0, 1: 0}))
        reports = job._run.record.reports
        if not was_first:
            reports._environment, reports._saved_at = Environment(replica=1), None
        job._loop._elastic._change_reports()
        parts.member = None
        # Its own save is not looked up.
        assert (age(job) < HOUR / 2) == was_first
        assert (HOUR <= age(job) < 2 * HOUR) != was_first


def test_who_becomes_replica_0_tells_no_restart_that_was_long_ago(tells, tmp_path):
    with start(tmp_path) as job:
        parts = job._parts
        parts.member = SimpleNamespace(membership=SimpleNamespace(ranks={0: 0, 1: 0}))
        job._run.record.reports._environment = Environment(replica=1, stopped_at=time.time() - HOUR)
        job._loop._elastic._change_reports()
        parts.member = None
        job._run.record.reports.note_step()
        report = job._run.record.reports._report(RoundReport(None, None), False)
        assert (report.resize_seconds, report.resize_kind) == (None, "")


def test_of_a_folder_with_nothing_whole_in_it_nobody_knows(tmp_path):
    assert last_created(tmp_path / "nothing") is None
    assert last_created(tmp_path) is None
    (tmp_path / "step-0000000003").mkdir()
    assert last_created(tmp_path) is None
    assert created_at("some day") is None
    assert abs(created_at(datetime.datetime.now(datetime.UTC).isoformat()) - time.time()) < HOUR
