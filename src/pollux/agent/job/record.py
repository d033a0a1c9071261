"""Records a run: in the receipt, in TensorBoard scalars, and in reports to the scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.distributed.device import gpu_type
from pollux.agent.distributed.sync_batchnorm import has_batchnorm
from pollux.agent.job.parts import JobParts
from pollux.agent.reporting.reporter import ReportBuilder
from pollux.agent.reporting.said_once import SaidOnce
from pollux.agent.reporting.status import TrainingStatus
from pollux.agent.reporting.tensorboard import Scalars
from pollux.core.errors import MisusedJob

__all__ = ["RunRecord"]

_log = logging.getLogger("pollux")


class RunRecord:
    """Records what happens to a run; only replica 0 sends reports and writes files.

    `seconds_before` is the training time of earlier processes of the job, `last_round` the result of the newest round.
    """

    def __init__(self, parts: JobParts, status: TrainingStatus) -> None:
        self._parts = parts
        self._status = status
        self._progress = parts.progress
        self._receipt = parts.receipt
        self._began = time.monotonic()
        self._row_at_step = -1
        self._unwritten = SaidOnce()
        self.seconds_before = 0.0
        self.last_round = RoundReport(None, None)
        self.scalars = Scalars(None)
        self.reports = ReportBuilder(status, parts.environment, gpu_type(parts.replicas.device))

    @property
    def seconds(self) -> float:
        """Time spent training, earlier processes included."""
        return self.seconds_before + time.monotonic() - self._began

    def event(self, kind: str, text: str, **numbers: float) -> None:
        """Add an event at the present step to the receipt."""
        self._receipt.event(kind, self._progress.steps, self._progress.progress, text, **numbers)

    def mark_not_exact(self, text: str) -> None:
        """Note in the receipt that the run is not exact, and why."""
        self._receipt.mark_not_exact(text, self._progress.steps, self._progress.progress)

    def note_batchnorm(self, accumulates: bool) -> None:
        """Note, once, if BatchNorm makes exactness impossible."""
        engine, num_replicas = self._parts.engine, self._parts.replicas.num_replicas
        if not has_batchnorm(engine.inner):
            return
        halves = self._parts.adaptation.measures_noise and num_replicas == 1
        split = accumulates or halves or (num_replicas > 1 and not engine.counts_batchnorm)
        if split and self._receipt.is_exact:
            cause = "accumulation" if accumulates else "measuring in halves" if halves else "unsynchronised replicas"
            text = (
                f"BatchNorm normalises over parts of the batch under {cause}: the curve differs from the whole batch's"
            )
            _log.warning("not exact: %s", text)
            self.mark_not_exact(text)

    def log(self, values: Mapping[str, float]) -> None:
        """Record the user's metrics, by samples and epoch."""
        progress = self._progress
        self._receipt.log(values, samples=progress.samples, epoch=progress.epochs, progress=progress.progress)
        self.scalars.metrics(values, progress.samples)
        self.reports.add_metrics(values)

    def step_done(self) -> None:
        """Note a step; the first one after a change of replicas ends its pause."""
        self.reports.note_step()
        if self._parts.member is not None:
            self._parts.member.stepped(self._progress.steps)

    def add_row(self) -> None:
        """Add a row for the present step, once."""
        if self._row_at_step == self._progress.steps:
            return
        self._row_at_step = self._progress.steps
        groups = self._parts.engine.optimizer.param_groups
        row = self._status.receipt_row(groups, self.seconds, self.last_round)
        self._receipt.sample(row)
        self.scalars.row(row)
        self._note_live()
        self.reports.round(self.last_round)

    def _note_live(self) -> None:
        member = self._parts.member
        self.reports.live = member is not None and not member.refusal

    def rolled_back(self) -> None:
        """Let TensorBoard hide what was written beyond the step to which the run was rolled back."""
        self.scalars.rolled_back(self._progress.samples)

    def enter_generation(self, generation: int) -> bool:
        """Let replica 0 of this generation of the job write reports and scalars.

        Returns whether another process may have written the last checkpoint, so that its age has to be looked up.
        """
        replicas = self._parts.replicas
        self.scalars.set_replica(replicas.replica)
        return self.reports.enter_generation(generation, replicas.replica, replicas.num_nodes)

    def write_receipt(self, folder: str | Path | None) -> list[Path]:
        """Write the receipt and its picture into a folder, by default the job's output folder; replica 0 only."""
        target = Path(folder) if folder is not None else self._parts.output_dir
        if target is None:
            raise MisusedJob("there is no folder for the receipt: pass output_dir= to pollux.init, or a folder here")
        self.add_row()
        return self._write_receipt(target)

    def _write_receipt(self, folder: Path) -> list[Path]:
        """Write the receipt, on replica 0; returns the files, none where that failed."""
        if self._parts.replicas.is_first:
            with self._unwritten.tolerated(f"the receipt in {folder}"):
                return self._receipt.write(folder)
        return []

    def write_output(self) -> None:
        """Write all files at the end of a run, or of this process's part in it."""
        self.add_row()
        if self._parts.output_dir is not None:
            self._write_receipt(self._parts.output_dir)
        self.scalars.flush()

    def close_reports(self, final: bool) -> None:
        """Send the last report of this process; `final`: the job is done."""
        self._note_live()
        self.reports.close(self.last_round, final)
