"""Runs the rounds of a training: measure, change the batch, and roll back a change that harms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pollux.agent.adaptation.adaptation import Adaptation, RoundReport
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.goodput import BatchChoice

__all__ = ["AdaptationRounds", "RoundOwner"]


class RoundOwner(Protocol):
    """A training whose rounds are run: it captures and restores its state, and records what happens."""

    def round_measured(self, report: RoundReport) -> None:
        """Note what a round has measured; nothing is decided yet."""

    def round_accepted(self, report: RoundReport, is_watched: bool) -> None:
        """Note that the steps of a round stay; `is_watched`: a change of batch before them may be rolled back."""

    def capture(self) -> Any:
        """The state that `restore` needs; called just before the batch changes."""

    def batch_changed(self, change: BatchChange, before: BatchChoice, total: int) -> None:
        """Note that the batch has changed, from `before` and its `total` samples."""

    def restore(self, captured: Any) -> dict[str, Any] | None:
        """Restore a captured state; returns the state of adaptation in it, None where weights and progress stay."""

    def rolled_back(self, why: str, total: int, bad: int) -> None:
        """Note that the batch is `total` samples again after `bad`, and that adaptation is frozen for a while."""


@dataclass(frozen=True, slots=True)
class _BeforeChange:
    captured: Any
    total: int


class AdaptationRounds:
    """Runs the rounds of one training, whichever framework computes its steps.

    Before a change of batch the owner captures its state. After a spike of the loss the owner restores it, and the
    batch is frozen for a while. Without a spike the captured state is dropped when the change has been watched long
    enough.
    """

    def __init__(self, adaptation: Adaptation, progress: TrainingProgress, owner: RoundOwner) -> None:
        self._adaptation = adaptation
        self._progress = progress
        self._owner = owner
        self._before: _BeforeChange | None = None

    def forget(self) -> None:
        """Drop the state to roll back to, for example because the replicas have changed."""
        self._before = None

    def run_due(self) -> None:
        """Run a round if one is due after the present step; a collective."""
        if self._adaptation.is_round(self._progress.steps):
            self._run()

    def _run(self) -> None:
        report = self._adaptation.round(self._progress.steps)
        self._owner.round_measured(report)
        if report.spike is not None and self._before is not None:
            self.roll_back(str(report.spike))
            return
        is_watching = self._adaptation.guard.is_watching
        self._owner.round_accepted(report, self._before is not None and is_watching)
        if not is_watching:
            self._before = None
        change = self._adaptation.next_change(self._progress.progress)
        if change is not None:
            self.change_batch(change)

    def change_batch(self, change: BatchChange) -> None:
        """Change to another batch."""
        choice, total = self._adaptation.choice, self._adaptation.total
        self._before = _BeforeChange(self._owner.capture(), total)
        self._adaptation.change_batch(change)
        self._owner.batch_changed(change, choice, total)

    def roll_back(self, why: str) -> None:
        """Return to the state before the last change of batch, and freeze the batch for a while."""
        before, self._before = self._before, None
        assert before is not None
        bad = self._adaptation.total
        state = self._owner.restore(before.captured)
        self._adaptation.go_back(before.total, self._progress.steps, state)
        self._adaptation.guard.freeze(self._progress.progress)
        self._owner.rolled_back(why, before.total, bad)
