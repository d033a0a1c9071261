"""What can be asked of a running job, and the parts that it is put together from. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pollux.agent.adaptation.adaptation import Adaptation, RoundReport
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.training_state import TrainingState
from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.loader import Loader
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.step_requests import StepRequests
from pollux.agent.environment import Environment
from pollux.agent.reporting.receipt import Receipt, ReceiptRow
from pollux.agent.reporting.tensorboard import Scalars
from pollux.agent.step.optimizer_step import StepRunner
from pollux.goodput import GoodputModel

__all__ = ["JobStatus", "Parts", "PassLedger"]

if TYPE_CHECKING:
    from pollux.agent.elastic.member import ElasticMember
    from pollux.agent.reporting.reporter import ReportBuilder


@dataclass(frozen=True, slots=True)
class PassLedger:
    """Which samples a pass has used so far: how many, and an order-independent hash of their indices.

    `expected_samples` and `expected_hash` are those of the whole pass, None while its end is not known.
    """

    pass_index: int
    samples: int
    hash: int
    expected_samples: int | None
    expected_hash: int | None

    @property
    def is_complete(self) -> bool:
        """Whether every sample of the pass was used exactly once."""
        return (self.samples, self.hash) == (self.expected_samples, self.expected_hash)


@dataclass(slots=True)
class Parts:
    """What a job is put together from; made by `init`."""

    replicas: ReplicaGroup
    engine: StepRunner
    loader: Loader
    adaptation: Adaptation
    progress: TrainingProgress
    state: TrainingState
    receipt: Receipt
    watch: StepRequests
    schedule: Schedule | None = None
    checkpointer: Checkpointer | None = None
    scalars: Scalars | None = None
    teller: ReportBuilder | None = None
    output_dir: Path | None = None
    move_batches: bool = True
    live: ElasticMember | None = None
    environment: Environment = field(default_factory=Environment)
    sync_batchnorm: bool = True
    on_close: Callable[[], None] = field(default=lambda: None)


class JobStatus:
    """The readable side of a job: where it stands, what it measured, what it used."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._replicas = parts.replicas
        self._engine = parts.engine
        self._loader = parts.loader
        self._adaptation = parts.adaptation
        self._progress = parts.progress
        self._receipt = parts.receipt

    @property
    def model(self) -> nn.Module:
        """The model to call in the loop: averages gradients over replicas where there are several. It may be kept."""
        return self._engine.given

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimiser; its learning rates are the base ones, without the factor for the batch."""
        return self._engine.optimizer

    @property
    def device(self) -> torch.device:
        """Where this replica trains."""
        return self._replicas.device

    @property
    def replica(self) -> int:
        """This replica's number, from 0."""
        return self._replicas.replica

    @property
    def num_replicas(self) -> int:
        """How many replicas train together."""
        return self._replicas.num_replicas

    @property
    def is_first(self) -> bool:
        """Whether this is replica 0: the one to print and to write files."""
        return self._replicas.is_first

    @property
    def is_exact(self) -> bool:
        """Whether the run follows the curve of plain PyTorch: exact mode, and nothing that makes it impossible."""
        return self._receipt.is_exact

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self._progress.steps

    @property
    def samples(self) -> int:
        """Samples that optimiser steps have used."""
        return self._progress.samples

    @property
    def progress(self) -> float:
        """Samples × efficiency, in samples at the initial batch; what epochs and schedules count."""
        return self._progress.progress

    @property
    def epoch(self) -> int:
        """The current epoch's number, from 0."""
        return self._progress.epoch

    @property
    def epochs_done(self) -> float:
        """Epochs of progress so far, with their fraction where an epoch's size is known."""
        return self._progress.epochs

    def expected_progress(self, epochs: float) -> float | None:
        """The progress at the end of that many epochs; None while an epoch's size is not known."""
        size = self._progress.epoch_size
        return None if size is None else float(epochs * size)

    @property
    def batch_size(self) -> int:
        """Samples of one optimiser step over all replicas, at present."""
        return self._adaptation.total

    @property
    def local_batch(self) -> int:
        """Samples of one micro-step on one replica, at most, at present."""
        return self._adaptation.choice.local_batch

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of one optimiser step, at present; 0 for none."""
        return self._adaptation.choice.accumulation

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """What each parameter group's learning rate is multiplied by for the present batch."""
        return self._adaptation.factors(self._adaptation.total, self._progress.epochs)

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale with its interval; it may say "unknown, at least x"."""
        return self._adaptation.estimate()

    @property
    def efficiency(self) -> float:
        """Progress per sample at the present batch, relative to the initial one, as it is counted now."""
        return self._adaptation.counted(self._adaptation.total)

    @property
    def goodput_model(self) -> GoodputModel | None:
        """Throughput and efficiency as known now, for predictions on other numbers of GPUs; None before a first fit."""
        return self._adaptation.goodput_model

    @property
    def receipt(self) -> Receipt:
        """What was adapted and why, so far."""
        return self._receipt

    def last_metrics(self) -> Mapping[str, float]:
        """What was logged last, by name."""
        return self._receipt.last_metrics()

    def ledger(self) -> PassLedger:
        """The samples used in the current pass; with several replicas, call it on all of them."""
        self._merge_ledger()
        expected: SampleLedger | None = self._loader.expected_ledger()
        used = self._loader.ledger
        return PassLedger(
            self._loader.pass_index,
            used.count,
            used.digest,
            None if expected is None else expected.count,
            None if expected is None else expected.digest,
        )

    def _merge_ledger(self) -> None:
        ledger = self._loader.ledger
        mine = torch.tensor(ledger.local_part(), dtype=torch.int64)
        count, digest = self._replicas.add_up(mine).tolist()
        ledger.absorb(count, digest)

    def _row(self, report: RoundReport, seconds: float) -> ReceiptRow:
        """This moment of the run, for the receipt."""
        adaptation, progress = self._adaptation, self._progress
        estimate = adaptation.estimate()
        known = estimate.num_measured > 0
        model = self.goodput_model
        return ReceiptRow(
            step=progress.steps,
            progress=progress.progress,
            samples=progress.samples,
            seconds=seconds,
            num_replicas=self.num_replicas,
            num_nodes=self._replicas.num_nodes,
            local_batch=self.local_batch,
            accumulation=self.accumulation,
            total_batch=self.batch_size,
            lr_factors=self.lr_factors,
            learning_rates=tuple(
                float(group["lr"]) * factor
                for group, factor in zip(self.optimizer.param_groups, self.lr_factors, strict=True)
            ),
            efficiency=self.efficiency,
            throughput=report.throughput,
            goodput=None if model is None else self._predicted(model),
            noise_scale=estimate.noise_scale if known else None,
            noise_low=estimate.low if known else None,
            noise_high=estimate.high if known else None,
            loss=report.loss,
        )

    def _predicted(self, model: GoodputModel) -> float:
        """Goodput as predicted for the present batch, with the efficiency that progress is counted by."""
        choice = self._adaptation.choice
        throughput = model.goodput_at(choice, self._replicas.num_nodes) / model.efficiency_at(choice.total)
        return throughput * self.efficiency
