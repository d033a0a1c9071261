"""A job that is told how much notice nodes give measures its checkpoints, says how long they take, and saves ahead."""

import os
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.checkpoint import folder
from pollux.agent.job import persistence
from pollux.core.errors import InvalidInput
from pollux.core.notice import FIRST_SECONDS, ahead_seconds

pytestmark = pytest.mark.usefixtures("tells")


@pytest.fixture
def start(tmp_path, monkeypatch):
    def make(notice: str) -> Any:
        monkeypatch.setenv("POLLUX_NOTICE_SECONDS", notice)
        model = nn.Linear(2, 1)
        data = TensorDataset(torch.ones(4, 2))
        return pollux.init(model, torch.optim.SGD(model.parameters(), lr=0.1), data, 2, checkpoint_dir=tmp_path)

    return make


def every(job: Any) -> float | None:
    seconds: float | None = job._parts.requests._every
    return seconds


def reported(job: Any) -> float | None:
    seconds: float | None = job._run.record.reports._report(RoundReport(None, None), False).checkpoint_seconds
    return seconds


def test_where_nothing_is_known_of_a_notice_checkpoints_are_as_rare_as_they_were(start):
    with start("") as job:
        job.checkpoint()
        assert every(job) == 600.0
        assert reported(job) > 0.0


def test_a_notice_that_suffices_changes_only_when_the_first_is_made(start):
    with start("600") as job:
        assert (every(job), reported(job)) == (FIRST_SECONDS, None)
        job.checkpoint()
        assert every(job) == 600.0


@pytest.mark.parametrize("disk_seconds", [0.0, 0.3])
def test_a_slow_disk_is_seen_and_saved_ahead_of(start, monkeypatch, disk_seconds):
    seen: list[tuple[float | None, float | None, float]] = []

    def noted(notice: float | None, checkpoint: float | None, pause: float = 0.0) -> float | None:
        seen.append((notice, checkpoint, pause))
        return ahead_seconds(notice, checkpoint, pause)

    fsync = os.fsync

    def slow(number: int) -> None:
        time.sleep(disk_seconds)
        fsync(number)

    monkeypatch.setattr(persistence, "ahead_seconds", noted)
    monkeypatch.setattr(folder.os, "fsync", slow)
    with start("3.2") as job:
        job.checkpoint()
        notice, measured, _ = seen[-1]
        assert (notice, measured) == (3.2, reported(job))
        assert measured >= disk_seconds
        assert every(job) == (ahead_seconds(*seen[-1]) or 600.0)
        if disk_seconds:
            assert every(job) < 600.0


def test_a_notice_of_nothing_is_one_and_nonsense_is_refused(start):
    with start("0") as job:
        job.checkpoint()
        assert every(job) < 600.0
    with pytest.raises(InvalidInput, match="POLLUX_NOTICE_SECONDS is 'soon'"):
        start("soon")
