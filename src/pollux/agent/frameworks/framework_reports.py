"""What the scheduler hears of a loop that a framework owns, and the request to stop that the scheduler makes.

Saving is the framework's own.
"""

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
    """Reports of replica 0 to the scheduler that started it, and requests to stop, agreed on by all replicas.

    It owns the rounds of a framework's loop: weights and progress stay where a change of batch is taken back.
    """

    def __init__(self, environment: Environment, status: TrainingStatus, gpu_type: str, epochs: float | None) -> None:
        self._status = status
        self._last = RoundReport(None, None)
        self._reports = ReportBuilder(status, environment, gpu_type)
        if epochs is not None:
            self._reports.set_epochs(epochs)
        self._requests: StepRequests | None = None

    def listen(self, replicas: ReplicaGroup) -> None:
        """From here on SIGTERM is a request to stop after a step, whatever it meant before."""
        if self._requests is None:
            self._requests = StepRequests(replicas, None)

    def wants_stop(self) -> bool:
        """Whether all replicas are to save and stop now; asked after each step, on all of them."""
        return self._requests is not None and STOP in self._requests.at_boundary(self._status.step)

    def step_done(self) -> None:
        """A step is done."""
        self._reports.note_step()

    def saved(self) -> None:
        """The framework has asked for the state of a checkpoint."""
        self._reports.note_save(time.time())

    def round_measured(self, report: RoundReport) -> None:
        """Report what the round found."""
        self._last = report
        self._reports.round(report)

    def round_accepted(self, report: RoundReport, is_watched: bool) -> None:
        """Nothing: the framework looks after losses that are not finite."""

    def capture(self) -> None:
        """Nothing: the weights are the framework's."""

    def batch_changed(self, change: BatchChange, before: BatchChoice, total: int) -> None:
        """Log it."""
        _log.info("batch %d to %d: %s", total, self._status.batch_size, change.reason)

    def restore(self, captured: None) -> None:
        """Nothing: only the batch goes back."""

    def rolled_back(self, why: str, total: int, bad: int) -> None:
        """Log it."""
        _log.warning("%s: back to batch %d from %d; the weights stay", why, total, bad)

    def close(self, final: bool) -> None:
        """Send the last report (`final`: the job is done), and restore the signal handlers."""
        self._reports.close(self._last, final)
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
