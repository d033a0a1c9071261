"""Tries local batches that may not fit into memory, survives those that do not, and notes them for later starts."""

from __future__ import annotations

import logging
import sys

from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.checkpoint.oom_notes import TrialNotes
from pollux.agent.data.step_shape import MicroBatch
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.job.record import RunRecord
from pollux.agent.step.oom import is_out_of_memory
from pollux.agent.step.optimizer_step import StepRunner
from pollux.core.errors import InvalidInput

__all__ = ["OomSurvival"]

_log = logging.getLogger("pollux")


class OomSurvival:
    """A job's trials of local batches; `notes` is None without a checkpoint folder."""

    def __init__(
        self,
        engine: StepRunner,
        adaptation: Adaptation,
        replicas: ReplicaGroup,
        record: RunRecord,
        notes: TrialNotes | None,
    ) -> None:
        self._engine = engine
        self._adaptation = adaptation
        self._replicas = replicas
        self._record = record
        self._notes = notes

    def begin_micro_batch(self, micro: MicroBatch) -> None:
        """Start a micro-batch; the first one of a step at a local batch that never ran starts a trial."""
        local = micro.largest_local_batch
        fits = self._adaptation.trial_from(local) if micro.index == 0 else None
        if fits is not None and self._notes is not None:
            self._notes.note_trial(local, self._adaptation.memory.largest_run, writes=self._replicas.is_first)
        self._engine.begin_micro_batch(micro, fits)

    def end_trial(self) -> None:
        """End the trial: the step is over or was dropped, and this process lives."""
        if self._notes is not None:
            self._notes.clear_trial(writes=self._replicas.is_first)

    def shrink_batch(self, local: int) -> None:
        """Use a smaller local batch from now on: this one ran out of memory on some replica."""
        if local <= 1:
            raise InvalidInput("memory does not hold a single sample: use a smaller model, or a GPU with more memory")
        before = self._adaptation.choice
        smaller = self._adaptation.shrink_batch(local)
        text = f"a local batch of {local} ran out of memory: back to {smaller}, the step's samples are used again"
        _log.warning("%s", text)
        self._record.event("out-of-memory", text, local_batch=local, smaller=smaller)
        if self._adaptation.choice.accumulation > before.accumulation:
            self._record.note_batchnorm(accumulates=True)

    def learn_from_earlier_starts(self) -> None:
        """Limit the local batch to less than one that ended an earlier start of the job; a collective."""
        lesson = None if self._notes is None else self._notes.learned(writes=self._replicas.is_first)
        everyones = self._replicas.gather([0.0, 0.0] if lesson is None else [float(number) for number in lesson])
        known = sorted((int(largest), int(local)) for local, largest in everyones.tolist() if largest > 0)
        if known and self._adaptation.limit_local_batch(known[0][0]):
            largest, local = known[0]
            text = f"a local batch of {local} ended an earlier start, out of memory: none above {largest} is tried"
            _log.warning("%s", text)
            self._record.event("out-of-memory", text, local_batch=local, smaller=largest)

    def note_end_of_process(self) -> None:
        """If the script ends because a trial ran out of memory, note that for the next start."""
        error = sys.exception() or getattr(sys, "last_value", None)
        if self._notes is not None and error is not None and is_out_of_memory(error):
            self._notes.note_out_of_memory()
        self.end_trial()
