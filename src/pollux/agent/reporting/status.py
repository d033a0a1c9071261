"""Where a training stands, for scripts and for reports to the scheduler. Nothing here changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.agent.adaptation.adaptation import Adaptation, RoundReport
from pollux.agent.adaptation.measurements import ReplicaExchange
from pollux.agent.adaptation.noise_scale import NoiseEstimate
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.data.loader import Loader
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.receipt_row import ReceiptRow
from pollux.goodput import GoodputModel

__all__ = ["PassLedger", "TrainingFigures", "TrainingStatus", "merge_ledger", "pass_ledger"]


@dataclass(frozen=True, slots=True)
class PassLedger:
    """How many samples a pass has used so far, and a hash of their indices that does not depend on their order.

    `expected_samples` and `expected_hash` are those of the whole pass; None while its end is not known.
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


def merge_ledger(loader: Loader, replicas: ReplicaExchange) -> None:
    """Add the ledgers of all replicas together; a collective."""
    ledger = loader.ledger
    count, digest = replicas.sum_integers(ledger.local_part())
    ledger.absorb(count, digest)


def pass_ledger(loader: Loader, replicas: ReplicaExchange) -> PassLedger:
    """The samples used in the current pass; a collective."""
    merge_ledger(loader, replicas)
    expected, used = loader.expected_ledger(), loader.ledger
    if expected is None:
        return PassLedger(loader.pass_index, used.count, used.digest, None, None)
    return PassLedger(loader.pass_index, used.count, used.digest, expected.count, expected.digest)


class TrainingFigures:
    """Steps, progress, batch and noise of a training.

    `receipt` is None for a loop that a framework owns: its metrics, and what makes it inexact, are not known here.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        progress: TrainingProgress,
        replicas: ReplicaExchange,
        receipt: Receipt | None = None,
    ) -> None:
        self._adaptation = adaptation
        self._progress = progress
        self._replicas = replicas
        self._receipt = receipt

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
        """Samples × efficiency, in samples at the initial batch; epochs and schedules count it."""
        return self._progress.progress

    @property
    def epochs_done(self) -> float:
        """Epochs of progress so far, with their fraction where an epoch's size is known."""
        return self._progress.epochs

    @property
    def num_replicas(self) -> int:
        """How many replicas train together."""
        return self._replicas.num_replicas

    @property
    def batch_size(self) -> int:
        """Samples of one optimiser step over all replicas, at present."""
        return self._adaptation.total

    @property
    def local_batch(self) -> int:
        """The most samples of one micro-step on one replica, at present."""
        return self._adaptation.choice.local_batch

    @property
    def accumulation(self) -> int:
        """Extra micro-steps of one optimiser step, at present; 0 for none."""
        return self._adaptation.choice.accumulation

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor of each parameter group's learning rate for the present batch."""
        return self._adaptation.factors(self._adaptation.total, self._progress.epochs)

    @property
    def noise(self) -> NoiseEstimate:
        """The gradient noise scale with its interval; it may say "unknown, at least x"."""
        return self._adaptation.estimate()

    @property
    def efficiency(self) -> float:
        """Progress per sample at the present batch, relative to the initial one, as it is counted now."""
        return self._adaptation.counted_efficiency(self._adaptation.total)

    @property
    def goodput_model(self) -> GoodputModel | None:
        """Throughput and efficiency as known now, to predict for other numbers of GPUs; None before the first fit."""
        return self._adaptation.goodput_model

    @property
    def is_exact(self) -> bool:
        """Whether the run follows the curve of plain PyTorch: exact mode, and nothing prevents exactness."""
        return not self._adaptation.adapts if self._receipt is None else self._receipt.is_exact

    def expected_progress(self, epochs: float) -> float | None:
        """The progress at the end of that many epochs; None while an epoch's size is not known."""
        size = self._progress.epoch_size
        return None if size is None else float(epochs * size)

    def last_metrics(self) -> Mapping[str, float]:
        """The newest value of each of the user's metrics, by name."""
        return {} if self._receipt is None else self._receipt.last_metrics()


class TrainingStatus(TrainingFigures):
    """The figures of a training with its predictions, for reports and for the receipt."""

    @property
    def reported_model(self) -> GoodputModel | None:
        """The goodput model, corrected by measurements near each placement. Reports use it; decisions do not."""
        return self._adaptation.reported_model

    @property
    def predicted_goodput(self) -> float | None:
        """Goodput as predicted for the present batch, with the efficiency that progress is counted by."""
        model, choice = self.goodput_model, self._adaptation.choice
        if model is None:
            return None
        throughput = model.goodput_at(choice, self._replicas.num_nodes) / model.efficiency_at(choice.total)
        return throughput * self.efficiency

    def receipt_row(self, groups: Sequence[Mapping[str, Any]], seconds: float, report: RoundReport) -> ReceiptRow:
        """The present moment as a row of the receipt.

        `groups` are the optimiser's parameter groups, with their base rates; `seconds` is the time spent training.
        """
        estimate, factors = self.noise, self.lr_factors
        known = estimate.num_measured > 0
        return ReceiptRow(
            step=self.step,
            progress=self.progress,
            samples=self.samples,
            seconds=seconds,
            num_replicas=self.num_replicas,
            num_nodes=self._replicas.num_nodes,
            local_batch=self.local_batch,
            accumulation=self.accumulation,
            total_batch=self.batch_size,
            lr_factors=factors,
            learning_rates=tuple(float(group["lr"]) * f for group, f in zip(groups, factors, strict=True)),
            efficiency=self.efficiency,
            throughput=report.throughput,
            goodput=self.predicted_goodput,
            noise_scale=estimate.noise_scale if known else None,
            noise_low=estimate.low if known else None,
            noise_high=estimate.high if known else None,
            loss=report.loss,
        )
