"""The rounds of a job that owns its loop: records changes of batch, and rolls back one that raises the loss."""

from __future__ import annotations

import logging
import math
from typing import Any

from pollux.agent.adaptation.adaptation import RoundReport
from pollux.agent.adaptation.batch_tuner import BatchChange
from pollux.agent.checkpoint.state import State
from pollux.agent.job.batch_feed import BatchFeed
from pollux.agent.job.parts import JobParts
from pollux.agent.job.persistence import JobPersistence
from pollux.agent.job.record import RunRecord
from pollux.agent.training.rounds import AdaptationRounds
from pollux.core.errors import NonFiniteValue, PolluxError
from pollux.goodput import BatchChoice

__all__ = ["JobRounds"]

_log = logging.getLogger("pollux")
# A scaler finds its scale by trials; where it has found none in this many rounds, there is none.
_MOST_ROUNDS_WITH_A_SCALER = 5


class JobRounds:
    """The owner of the rounds of a job's own loop; a roll-back restores the whole state."""

    def __init__(self, parts: JobParts, record: RunRecord, persistence: JobPersistence, feed: BatchFeed) -> None:
        self._engine = parts.engine
        self._adaptation = parts.adaptation
        self._progress = parts.progress
        self._state = parts.state
        self._checkpointer = parts.checkpointer
        self._record = record
        self._persistence = persistence
        self._feed = feed
        self._rounds = AdaptationRounds(parts.adaptation, parts.progress, self)
        self._num_not_finite = 0

    def forget(self) -> None:
        """Forget the state to roll back to, since the replicas have changed."""
        self._rounds.forget()
        self._num_not_finite = 0

    def run_due(self) -> None:
        """Run a round if one is due after the present step; a collective."""
        self._rounds.run_due()

    # As the owner of the rounds

    def round_measured(self, report: RoundReport) -> None:
        """Note what a round has measured; nothing is decided yet."""
        self._record.last_round = report

    def round_accepted(self, report: RoundReport, is_watched: bool) -> None:
        """Keep the steps of the round, unless their loss is not finite."""
        self._engine.tolerates = is_watched
        self._require_finite(report.loss)
        self._record.add_row()

    def _require_finite(self, loss: float | None) -> None:
        finite = loss is None or math.isfinite(loss)
        self._num_not_finite = 0 if finite else self._num_not_finite + 1
        if self._num_not_finite > (_MOST_ROUNDS_WITH_A_SCALER if self._engine.has_scaler else 0):
            raise NonFiniteValue(
                f"the loss became {loss} by step {self._progress.steps}: lower the learning rate, clip gradients "
                "(clip_norm=), or check the data; the last checkpoint is untouched"
            )

    def capture(self) -> State:
        """A copy of the whole state; a collective."""
        return self._state.copied(self._persistence.capture())

    def batch_changed(self, change: BatchChange, before: BatchChoice, total: int) -> None:
        """Record the change; for a while the guard judges losses that are not finite."""
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

    def restore(self, captured: State) -> dict[str, Any]:
        """Restore the captured state."""
        self._engine.abandon()
        self._engine.tolerates = False
        self._persistence.restore(captured, in_place=False)
        self._state.restore_rng(captured.values, self._progress.steps)
        state: dict[str, Any] = captured.values["adaptation"]
        return state

    def rolled_back(self, why: str, total: int, bad: int) -> None:
        """Save the restored state, remove later checkpoints, and record the roll-back."""
        step = self._progress.steps
        self._feed.forget()
        if self._checkpointer is not None:
            # Later checkpoints are removed only after the restored state is saved.
            try:
                self._persistence.checkpoint(wait=True)
            except PolluxError as error:
                # Only replica 0 knows of the failure, and all replicas must continue alike.
                _log.error("rolled back, but not saved: %s", error)
            self._checkpointer.drop_after(step)
        self._record.rolled_back()
        until = self._adaptation.guard.frozen_until
        text = f"{why}: back to step {step} and batch {total:,} from {bad:,}, which is left alone"
        _log.warning("%s", text)
        self._record.event("rolled-back", text, before=bad, after=total)
        self._record.event("frozen", f"no change of batch until progress {until:,.0f}")
