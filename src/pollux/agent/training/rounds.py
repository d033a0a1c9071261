"""Rounds of a training: what was measured decides about the batch, and a change of batch that harms is taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pollux.agent.adaptation.adaptation import Adaptation, RoundReport
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.adaptation.progress import TrainingProgress
from pollux.goodput import BatchChoice

__all__ = ["AdaptationRounds", "RoundOwner"]


class RoundOwner(Protocol):
    """A training that rounds belong to: it saves and restores its own state, and says what happened."""

    def round_measured(self, report: RoundReport) -> None:
        """A round was measured; nothing is decided yet."""

    def round_accepted(self, report: RoundReport, is_watched: bool) -> None:
        """The steps of the round stay. `is_watched`: a change of batch before them may still be taken back."""

    def capture(self) -> Any:
        """What `restore` will need; called just before the batch changes."""

    def batch_changed(self, change: BatchChange, before: BatchChoice, total: int) -> None:
        """The batch changed, from `before` and its `total` samples."""

    def restore(self, captured: Any) -> dict[str, Any] | None:
        """Return to what was captured; the state of adaptation in it, None where weights and progress stay."""

    def rolled_back(self, why: str, total: int, bad: int) -> None:
        """The batch went back to `total` samples from `bad`, and adaptation is frozen for a while."""


@dataclass(frozen=True, slots=True)
class _BeforeChange:
    captured: Any
    total: int


class AdaptationRounds:
    """Runs the rounds of one training, whichever framework computes its steps.

    Before a change of batch the owner captures its state. It is kept until the loss has shown that the change does no
    harm; after a spike the owner restores it, and the batch stays as it was for a while.
    """

    def __init__(self, adaptation: Adaptation, progress: TrainingProgress, owner: RoundOwner) -> None:
        self._adaptation = adaptation
        self._progress = progress
        self._owner = owner
        self._before: _BeforeChange | None = None

    def forget(self) -> None:
        """Drop the state to roll back to, for instance because the replicas have changed."""
        self._before = None

    def run_due(self) -> None:
        """Run a round where one is due after the present step; a collective."""
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
        """Go over to another batch."""
        choice, total = self._adaptation.choice, self._adaptation.total
        self._before = _BeforeChange(self._owner.capture(), total)
        self._adaptation.change_batch(change)
        self._owner.batch_changed(change, choice, total)

    def roll_back(self, why: str) -> None:
        """Return to the state before the last change of batch, and leave the batch alone for a while."""
        before, self._before = self._before, None
        assert before is not None
        bad = self._adaptation.total
        state = self._owner.restore(before.captured)
        self._adaptation.go_back(before.total, self._progress.steps, state)
        self._adaptation.guard.freeze(self._progress.progress)
        self._owner.rolled_back(why, before.total, bad)
