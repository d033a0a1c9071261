"""The parts of a job and the objects that work with them. The training loop and live resizes use it."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.agent.checkpoint.oom_notes import TrialNotes
from pollux.agent.job.batch_feed import BatchFeed
from pollux.agent.job.oom_survival import OomSurvival
from pollux.agent.job.parts import JobParts
from pollux.agent.job.persistence import JobPersistence
from pollux.agent.job.record import RunRecord
from pollux.agent.job.rounds import JobRounds
from pollux.agent.reporting.status import TrainingStatus

__all__ = ["JobRun"]


@dataclass(frozen=True, slots=True)
class JobRun:
    """The parts of a job, and what records, saves, feeds and adapts it."""

    parts: JobParts
    record: RunRecord
    persistence: JobPersistence
    feed: BatchFeed
    oom: OomSurvival
    rounds: JobRounds

    @classmethod
    def of(cls, parts: JobParts, status: TrainingStatus) -> JobRun:
        """The run of a job that has these parts and shows this status."""
        record = RunRecord(parts, status)
        persistence = JobPersistence(parts, record)
        feed = BatchFeed(parts, record)
        notes = None
        if parts.checkpointer is not None:
            # In exact mode the batch stays as requested, unless it is certain that memory does not hold it.
            kind, adapts = parts.adaptation.memory.gpu_type, parts.adaptation.adapts
            notes = TrialNotes(parts.checkpointer.folder, kind, counts_deaths=adapts)
        oom = OomSurvival(parts.engine, parts.adaptation, parts.replicas, record, notes)
        return cls(parts, record, persistence, feed, oom, JobRounds(parts, record, persistence, feed))
