"""Rounds of a job's own loop: what was measured decides about the batch, and a change that harms is taken back."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.checkpoint.training_state import State
from pollux.agent.job.batch_feed import BatchFeed
from pollux.agent.job.parts import JobParts
from pollux.agent.job.persistence import JobPersistence
from pollux.agent.job.record import RunRecord
from pollux.core.errors import NonFiniteValue, PolluxError

__all__ = ["Rounds"]

_log = logging.getLogger("pollux")
# A scaler finds its scale by trying; what it never finds in this many rounds is not there.
_MOST_ROUNDS_WITH_A_SCALER = 5


@dataclass(frozen=True, slots=True)
class _Snapshot:
    state: State
    total: int
    step: int


class Rounds:
    """Changes the batch between rounds, keeps the state from before the change, and returns to it after a spike."""

    def __init__(self, parts: JobParts, record: RunRecord, persistence: JobPersistence, feed: BatchFeed) -> None:
        self._engine = parts.engine
        self._adaptation = parts.adaptation
        self._progress = parts.progress
        self._state = parts.state
        self._checkpointer = parts.checkpointer
        self._record = record
        self._persistence = persistence
        self._feed = feed
        self._snapshot: _Snapshot | None = None
        self._num_not_finite = 0

    def forget(self) -> None:
        """Forget the state to roll back to: replicas have changed since."""
        self._snapshot = None
        self._num_not_finite = 0

    def run_due(self) -> None:
        """Run a round where one is due after the present step; a collective."""
        if self._adaptation.is_round(self._progress.steps):
            self._run()

    def _run(self) -> None:
        report = self._record.last_round = self._adaptation.round(self._progress.steps)
        if report.spike is not None and self._snapshot is not None:
            self.roll_back(str(report.spike))
            return
        is_watching = self._adaptation.guard.is_watching
        self._engine.tolerates = self._snapshot is not None and is_watching
        self._require_finite(report.loss)
        self._record.add_row()
        if not is_watching:
            self._snapshot = None
        change = self._adaptation.next_change(self._progress.progress)
        if change is not None:
            self.change_batch(change)

    def _require_finite(self, loss: float | None) -> None:
        finite = loss is None or math.isfinite(loss)
        self._num_not_finite = 0 if finite else self._num_not_finite + 1
        if self._num_not_finite > (_MOST_ROUNDS_WITH_A_SCALER if self._engine.has_scaler else 0):
            raise NonFiniteValue(
                f"the loss became {loss} by step {self._progress.steps}: lower the learning rate, clip gradients "
                "(clip_norm=), or check the data; the last checkpoint is untouched"
            )

    def change_batch(self, change: BatchChange) -> None:
        """Go over to another batch; the state from before is kept until the loss has shown that it does no harm."""
        before, total = self._adaptation.choice, self._adaptation.total
        captured = self._state.copied(self._persistence.capture())
        self._snapshot = _Snapshot(captured, total, self._progress.steps)
        self._adaptation.take(change)
        self._engine.tolerates = True
        after = self._adaptation.total
        text = f"batch {total:,} to {after:,}: {change.reason}"
        _log.info("%s", text)
        self._record.event(
            "batch-changed",
            text,
            before=total,
            after=after,
            gain=change.gain,
            efficiency=change.efficiency,
            accumulation=change.choice.accumulation,
        )
        if change.choice.accumulation > before.accumulation:
            self._record.note_batchnorm(accumulates=True)

    def roll_back(self, why: str) -> None:
        """Return to the state from before the last change of batch, and leave the batch alone for a while."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        bad = self._adaptation.total
        self._engine.abandon()
        self._engine.tolerates = False
        self._persistence.restore(snapshot.state, in_place=False)
        self._state.restore_rng(snapshot.state.values, snapshot.step)
        self._adaptation.go_back(snapshot.total, snapshot.step, snapshot.state.values["adaptation"])
        self._adaptation.guard.freeze(self._progress.progress)
        self._feed.forget()
        if self._checkpointer is not None:
            # First the one to go on from, then those that nobody is to go on from.
            try:
                self._persistence.checkpoint(wait=True)
            except PolluxError as error:
                # Only the first replica knows of it, and all of them go on.
                _log.error("rolled back, but not saved: %s", error)
            self._checkpointer.drop_after(snapshot.step)
        self._record.rolled_back()
        until = self._adaptation.guard.frozen_until
        text = f"{why}: back to step {snapshot.step} and batch {snapshot.total:,} from {bad:,}, which is left alone"
        _log.warning("%s", text)
        self._record.event("rolled-back", text, before=bad, after=snapshot.total)
        self._record.event("frozen", f"no change of batch until progress {until:,.0f}")
