"""The job object of a training script: epochs, batches, backward, and where the training stands.

`training_loop` has the loop, `persistence` saves, `record` writes the receipt and reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pollux.agent.job.parts import JobParts
from pollux.agent.job.run import JobRun
from pollux.agent.job.training_loop import JobStopped, TrainingLoop
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.status import PassLedger, TrainingFigures, TrainingStatus, pass_ledger

__all__ = ["Job", "JobStopped"]


class Job(TrainingFigures):
    """A training job; made by `pollux.init`. `TrainingFigures` has its steps, progress, batch and noise.

    ```
    for epoch in job.epochs(90):
        for x, y in job.batches():
            loss = F.cross_entropy(job.model(x), y)
            job.backward(loss)
    ```
    """

    def __init__(self, parts: JobParts) -> None:
        figures = parts.adaptation, parts.progress, parts.replicas, parts.receipt
        super().__init__(*figures)
        self._parts = parts
        self._run = JobRun.of(parts, TrainingStatus(*figures))
        self._loop = TrainingLoop(self._run)

    def _start(self, tensorboard_dir: str | os.PathLike[str] | None) -> None:
        """Resume or begin; called once, by `pollux.init`."""
        self._loop.start(tensorboard_dir)

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs to train, up to `count` in all; resumes inside an interrupted epoch.

        An epoch is one pass over the data at the initial batch, and with larger batches the same progress.
        """
        return self._loop.epochs(count)

    def batches(self) -> Iterator[Any]:
        """This replica's batches until the epoch is over, moved to its device; pass each one's loss to `backward`.

        With accumulation one optimiser step uses several of them. After a `break` the epoch counts as done, and in
        exact mode the rest of its pass is skipped. Between two steps, once the script asks for the next batch, replicas
        change, checkpoints are saved, and a request to stop ends the process: see `JobStopped`.
        """
        return self._loop.batches()

    def backward(self, loss: Tensor, *, reduction: str = "mean", weight: float | Tensor | None = None) -> None:
        """Run the backward pass, and after the last micro-batch of a step the optimiser.

        `loss` is the mean over the samples of the batch, or their sum (`reduction="sum"`), or the mean over something
        else, such as tokens, whose number in this batch is `weight`. At any number of replicas and any accumulation the
        gradient is that of the whole batch.
        """
        self._loop.backward(loss, reduction, weight)

    def log(self, **values: float) -> None:
        """Add the user's metrics to the receipt and to TensorBoard, by samples and epoch."""
        self._run.record.log(values)

    def checkpoint(self, *, wait: bool = True) -> None:
        """Save a checkpoint now; with several replicas, call it on all of them at the same step."""
        self._run.persistence.checkpoint(wait=wait)

    def write_receipt(self, folder: str | Path | None = None) -> list[Path]:
        """Write `receipt.json` and its picture into a folder, by default the job's output folder; replica 0 only."""
        return self._run.record.write_receipt(folder)

    def close(self) -> None:
        """Restore signal handlers, finish writing, leave the process group; then another job may start."""
        self._loop.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self._loop.failed = self._loop.failed or error is not None
        self.close()

    @property
    def model(self) -> nn.Module:
        """The model to call in the loop, which averages gradients over replicas. The script may keep it."""
        return self._parts.engine.given

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimiser; its learning rates are the base ones, without the factor for the batch."""
        return self._parts.engine.optimizer

    @property
    def device(self) -> torch.device:
        """The device on which this replica trains."""
        return self._parts.replicas.device

    @property
    def replica(self) -> int:
        """The number of this replica, from 0."""
        return self._parts.replicas.replica

    @property
    def is_first(self) -> bool:
        """Whether this is replica 0: the one to print and to write files."""
        return self._parts.replicas.is_first

    @property
    def epoch(self) -> int:
        """The current epoch's number, from 0."""
        return self._parts.progress.epoch

    @property
    def receipt(self) -> Receipt:
        """The receipt so far: what was adapted and why."""
        return self._parts.receipt

    def ledger(self) -> PassLedger:
        """The samples used in the present pass; with several replicas, call it on all of them."""
        return pass_ledger(self._parts.loader, self._parts.replicas)
