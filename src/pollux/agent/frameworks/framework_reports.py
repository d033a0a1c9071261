"""Reports to the scheduler from a loop that a framework owns, and the scheduler's requests to stop."""

from __future__ import annotations

import logging
import time

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.step_requests import STOP, StepRequests
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.agent.reporting.status import TrainingStatus
from pollux.goodput import BatchChoice

__all__ = ["FrameworkReports"]

_log = logging.getLogger("pollux")


class FrameworkReports:
    """Reports of replica 0 to the scheduler that started it, and requests to stop that all replicas agree on.

    It owns the rounds of a framework's loop; a roll-back there restores the batch only.
    """

    def __init__(self, environment: Environment, status: TrainingStatus, gpu_type: str, epochs: float | None) -> None:
        self._status = status
        self._last = RoundReport(None, None)
        self._reports = ReportBuilder(status, environment, gpu_type)
        if epochs is not None:
            self._reports.set_epochs(epochs)
        self._requests: StepRequests | None = None

    def listen(self, replicas: ReplicaGroup) -> None:
        """Let SIGTERM request a stop after a step."""
        if self._requests is None:
            self._requests = StepRequests(replicas, None)

    def wants_stop(self) -> bool:
        """Whether all replicas are to save and stop now; asked after each step, on all of them."""
        return self._requests is not None and STOP in self._requests.at_boundary(self._status.step)

    def step_done(self) -> None:
        """Note a step."""
        self._reports.note_step()

    def saved(self) -> None:
        """Note that the framework saves a checkpoint."""
        self._reports.note_save(time.time())

    def round_measured(self, report: RoundReport) -> None:
        """Report what the round found."""
        self._last = report
        self._reports.round(report)

    def round_accepted(self, report: RoundReport, is_watched: bool) -> None:
        """Do nothing: the framework handles losses that are not finite."""

    def capture(self) -> None:
        """Capture nothing: the weights are the framework's."""

    def batch_changed(self, change: BatchChange, before: BatchChoice, total: int) -> None:
        """Log the change."""
        _log.info("batch %d to %d: %s", total, self._status.batch_size, change.reason)

    def restore(self, captured: None) -> None:
        """Restore nothing but the batch."""

    def rolled_back(self, why: str, total: int, bad: int) -> None:
        """Log the roll-back."""
        _log.warning("%s: back to batch %d from %d; the weights stay", why, total, bad)

    def close(self, final: bool) -> None:
        """Send the last report (`final`: the job is done), and restore the signal handlers."""
        self._reports.close(self._last, final)
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
