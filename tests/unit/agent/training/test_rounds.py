"""Rounds: when they run, what the owner is told, and what is restored after a change of batch that harms."""

from types import SimpleNamespace

import pytest

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.loss_guard import Spike
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.agent.training.rounds import AdaptationRounds
from pollux.goodput import BatchChoice

SPIKE = Spike(2.0, 1.0, 1.5, 3)
CHANGE = SimpleNamespace(choice=BatchChoice(32, 0, 1), reason="better")


class Guard:
    is_watching = False

    def __init__(self):
        self.frozen_at = None

    def freeze(self, progress):
        self.frozen_at = progress


class Adaptation:
    """Decides what the test says; a round is due every ten steps."""

    def __init__(self):
        self.guard = Guard()
        self.choice, self.total = BatchChoice(16, 0, 1), 16
        self.report = RoundReport(1.0, 100.0)
        self.change = None
        self.went_back = None

    def is_round(self, step):
        return step % 10 == 0

    def round(self, step):
        return self.report

    def next_change(self, progress):
        change, self.change = self.change, None
        return change

    def change_batch(self, change):
        self.choice, self.total = change.choice, change.choice.total

    def go_back(self, total, step, state):
        self.went_back = total, step, state
        self.total = total


class Owner:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []
        self.state = "state at the start"

    def round_measured(self, report):
        self.told.append("measured")

    def round_accepted(self, report, is_watched):
        self.told.append(f"accepted, watched: {is_watched}")

    def capture(self):
        self.told.append("captured")
        return self.state

    def batch_changed(self, change, before, total):
        self.told.append(f"batch {total} of {before.local_batch} changed")

    def restore(self, captured):
        self.state = captured
        return {"restored": captured}

    def rolled_back(self, why, total, bad):
        self.told.append(f"rolled back from {bad} to {total}")


@pytest.fixture
def training():
    adaptation, progress, owner = Adaptation(), TrainingProgress(100), Owner()
    progress.steps, progress.progress = 10, 160.0
    return SimpleNamespace(
        adaptation=adaptation, progress=progress, owner=owner, rounds=AdaptationRounds(adaptation, progress, owner)
    )


def test_a_round_runs_only_where_one_is_due(training):
    training.progress.steps = 11
    training.rounds.run_due()
    assert training.owner.told == []
    training.progress.steps = 20
    training.rounds.run_due()
    assert training.owner.told == ["measured", "accepted, watched: False"]


def change_batch(training):
    training.adaptation.change = CHANGE
    training.rounds.run_due()
    training.owner.told.clear()
    training.adaptation.guard.is_watching = True


def test_the_state_is_captured_before_the_batch_changes(training):
    training.adaptation.change = CHANGE
    training.rounds.run_due()
    assert training.owner.told[2:] == ["captured", "batch 16 of 16 changed"]
    assert training.adaptation.total == 32


def test_after_a_spike_the_captured_state_and_the_batch_return_and_the_batch_is_frozen(training):
    change_batch(training)
    training.owner.state, training.adaptation.report = "later state", RoundReport(9.0, 100.0, SPIKE)
    training.rounds.run_due()
    assert training.owner.told == ["measured", "rolled back from 32 to 16"], "the round was not accepted"
    assert training.owner.state == "state at the start"
    assert training.adaptation.went_back == (16, 10, {"restored": "state at the start"})
    assert training.adaptation.guard.frozen_at == 160.0


def test_a_second_spike_finds_nothing_to_return_to(training):
    change_batch(training)
    training.adaptation.report = RoundReport(9.0, 100.0, SPIKE)
    training.rounds.run_due()
    training.owner.told.clear()
    training.rounds.run_due()
    assert training.owner.told == ["measured", "accepted, watched: False"]


def test_a_change_that_the_guard_no_longer_watches_stays(training):
    change_batch(training)
    training.rounds.run_due()
    assert training.owner.told == ["measured", "accepted, watched: True"]
    training.adaptation.guard.is_watching = False
    training.rounds.run_due()
    training.adaptation.report = RoundReport(9.0, 100.0, SPIKE)
    training.rounds.run_due()
    assert training.adaptation.went_back is None


def test_forgotten_state_is_not_returned_to(training):
    change_batch(training)
    training.rounds.forget()
    training.adaptation.report = RoundReport(9.0, 100.0, SPIKE)
    training.rounds.run_due()
    assert training.adaptation.went_back is None
