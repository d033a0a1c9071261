"""Where a training stands: what it shows, its rows in the receipt, and which samples a pass has used."""

from types import SimpleNamespace

import numpy as np
import pytest

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.noise_scale import NoiseTracker
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.data.ledger import SampleLedger
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.reporting.status import TrainingStatus, merge_ledger, pass_ledger
from pollux.goodput import BatchChoice


class Adaptation:
    """A batch of 64 in two micro-steps of 16 on two replicas, worth half its samples."""

    def __init__(self):
        self.choice, self.total, self.adapts = BatchChoice(16, 1, 2), 64, True
        self.goodput_model = None
        self.tracker = NoiseTracker(16, 1)

    def factors(self, total, epochs):
        return (2.0 + epochs,)

    def estimate(self):
        return self.tracker.estimate()

    def counted_efficiency(self, total):
        return 32.0 / total


@pytest.fixture
def adaptation():
    return Adaptation()


@pytest.fixture
def progress():
    made = TrainingProgress(100)
    made.add(64, 1.0)
    made.add(64, 0.5)
    return made


def receipt(**options):
    return Receipt("test", mode="exact", initial_batch=16, **options)


REPLICAS = SimpleNamespace(num_replicas=2, num_nodes=1)


def test_it_shows_steps_progress_and_the_present_batch(adaptation, progress):
    status = TrainingStatus(adaptation, progress, REPLICAS)
    assert (status.step, status.samples, status.progress) == (2, 128, 96.0)
    assert status.epochs_done == 0.96
    assert (status.num_replicas, status.batch_size, status.local_batch, status.accumulation) == (2, 64, 16, 1)
    assert status.efficiency == 0.5
    assert status.lr_factors == (2.96,)


def test_the_progress_of_epochs_is_known_once_their_size_is(adaptation, progress):
    assert TrainingStatus(adaptation, progress, REPLICAS).expected_progress(1.5) == 150.0
    assert TrainingStatus(adaptation, TrainingProgress(None), REPLICAS).expected_progress(1.5) is None


def test_without_a_receipt_only_the_mode_says_whether_it_is_exact(adaptation, progress):
    status = TrainingStatus(adaptation, progress, REPLICAS)
    assert not status.is_exact
    assert status.last_metrics() == {}
    adaptation.adapts = False
    assert status.is_exact


def test_the_receipt_knows_metrics_and_what_made_a_run_inexact(adaptation, progress):
    record = receipt()
    status = TrainingStatus(adaptation, progress, REPLICAS, record)
    assert status.is_exact
    record.log({"accuracy": 0.9}, samples=1, epoch=0.1, progress=1.0)
    record.mark_not_exact("a reason")
    assert not status.is_exact
    assert status.last_metrics() == {"accuracy": 0.9}


def test_goodput_is_predicted_with_the_efficiency_that_progress_counts(adaptation, progress):
    status = TrainingStatus(adaptation, progress, REPLICAS)
    assert status.predicted_goodput is None
    adaptation.goodput_model = SimpleNamespace(
        goodput_at=lambda choice, num_nodes: 80.0 * num_nodes, efficiency_at=lambda total: 0.8
    )
    assert status.predicted_goodput == pytest.approx(100.0 * 0.5)


def test_a_row_has_the_rates_that_steps_use_and_no_noise_before_any_was_measured(adaptation, progress):
    status = TrainingStatus(adaptation, progress, REPLICAS)
    row = status.receipt_row([{"lr": 0.1}], 7.0, RoundReport(1.5, 200.0))
    assert row.configuration == (2, 1, 16, 1, 64)
    assert row.learning_rates == pytest.approx((0.296,))
    assert (row.loss, row.throughput, row.seconds) == (1.5, 200.0, 7.0)
    assert (row.noise_scale, row.noise_low, row.noise_high) == (None, None, None)
    adaptation.tracker.add([[3.0]], [[2.0]], [2], [16])
    assert status.receipt_row([{"lr": 0.1}], 7.0, RoundReport(None, None)).noise_low == 0.0


class PassOfTen:
    """The loader of one of two replicas that has used the first half of ten samples; the other has the rest."""

    pass_index = 3

    def __init__(self, whole=True):
        self.ledger = SampleLedger()
        self.ledger.add(np.arange(5))
        self._whole = whole

    def expected_ledger(self):
        return SampleLedger.of(np.arange(10)) if self._whole else None


class Other:
    """The other replica's part is added to what this one gives."""

    def sum_integers(self, values):
        other = SampleLedger()
        other.add(np.arange(5, 10))
        return [mine + its for mine, its in zip(values, other.local_part(), strict=True)]


def test_ledgers_of_all_replicas_add_up_to_the_whole_pass():
    loader = PassOfTen()
    assert not pass_ledger(loader, SimpleNamespace(sum_integers=list)).is_complete
    loader = PassOfTen()
    ledger = pass_ledger(loader, Other())
    assert (ledger.pass_index, ledger.samples, ledger.expected_samples) == (3, 10, 10)
    assert ledger.is_complete
    merge_ledger(loader, SimpleNamespace(sum_integers=list))
    assert loader.ledger.count == 10, "nothing is counted twice"


def test_a_pass_whose_end_is_not_known_is_not_complete():
    ledger = pass_ledger(PassOfTen(whole=False), Other())
    assert (ledger.samples, ledger.expected_samples, ledger.expected_hash) == (10, None, None)
    assert not ledger.is_complete
