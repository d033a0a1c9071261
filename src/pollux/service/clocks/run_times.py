"""How long jobs have run, as their backend measured it: time limits use that, not the service's clock."""

from __future__ import annotations

from collections.abc import Iterable

from pollux.backends.protocol import Backend
from pollux.controller import JobRan, JobRecord

__all__ = ["RunTimes"]

# The run time of a job with a time limit becomes a fact this often: another machine may have to go on from it.
_KEPT_SECONDS = 300.0
# A difference of no more than this needs no correction.
_CLOSE_SECONDS = 5.0


class RunTimes:
    """Compares what the backend measured with what the clock shows; the differences are facts."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._kept_at: float | None = None

    def corrected(self, record: JobRecord, at: float) -> JobRan | None:
        """The measured run time, if it differs from the clock's; None if it does not, or none was measured."""
        ran = self._measured(record, at)
        return None if ran is None or not _differs(record, at, ran.seconds) else ran

    def known(self, record: JobRecord, at: float, newest_at: float) -> JobRan | None:
        """The same for a job whose processes are gone: without a measurement it ran until the newest fact at most.

        The last service wrote that fact; nobody knows what happened since then.
        """
        if record.running_since is None:
            return None
        last = JobRan(at, record.spec.id, record.generation, max(newest_at - record.running_since, 0.0))
        ran = self._measured(record, at) or last
        return ran if _differs(record, at, ran.seconds) else None

    def to_keep(self, records: Iterable[JobRecord], at: float) -> list[JobRan]:
        """Every few minutes the run times of all jobs with a time limit; else nothing."""
        if self._kept_at is None or at < self._kept_at:
            self._kept_at = at
        if at < self._kept_at + _KEPT_SECONDS:
            return []
        self._kept_at = at
        limited = (record for record in records if record.spec.time_limit_seconds is not None)
        return [ran for record in limited if (ran := self._measured(record, at)) is not None]

    def _measured(self, record: JobRecord, at: float) -> JobRan | None:
        if record.running_since is None:
            return None
        seconds = self._backend.ran_seconds(record.spec.id, record.generation)
        return None if seconds is None else JobRan(at, record.spec.id, record.generation, seconds)


def _differs(record: JobRecord, at: float, seconds: float) -> bool:
    return record.running_since is not None and abs(at - record.running_since - seconds) > _CLOSE_SECONDS
