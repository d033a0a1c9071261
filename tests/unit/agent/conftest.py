import sys
from typing import Any

import pytest

from pollux.agent.checkpoint.checkpointer import Checkpointer


@pytest.fixture
def writer(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    yield checkpointer
    checkpointer.close()


@pytest.fixture(autouse=True)
def no_job_stays():
    """Close the job that a test has left open: a process may have one."""
    yield
    initialize = sys.modules.get("pollux.agent.initialize")
    job = None if initialize is None or initialize._active is None else initialize._active()
    if job is not None:
        job.close()


class IdleReporter:
    """Takes no report."""

    wants_report = False

    def close(self, report: Any) -> None:
        pass


@pytest.fixture
def tells(monkeypatch):
    """Let every job have a reporter."""
    from pollux.agent.reporting import reporter

    monkeypatch.setattr(reporter, "reporter_for", lambda environment: IdleReporter())
