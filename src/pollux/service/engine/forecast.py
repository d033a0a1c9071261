"""The plan for a submitter: the policy's own answer for the job, in numbers and one sentence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from pollux.controller import Controller, JobRecord, JobSpec
from pollux.controller.explanations.explain import explain_plan
from pollux.controller.explanations.forecast import plan_from
from pollux.core import Decision, Snapshot
from pollux.service.views.estimates import times_of
from pollux.service.views.job_board import frozen
from pollux.wire.status import Plan

__all__ = ["Forecast", "plan_of"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job and a snapshot that has it, taken in the engine's thread; the policy is asked elsewhere.

    `is_draft`: only this forecast knows of the job. `undecided` are earlier jobs that hold no GPUs and that no
    decision has covered yet.
    """

    record: JobRecord
    snapshot: Snapshot
    is_draft: bool = False
    undecided: tuple[str, ...] = ()

    @classmethod
    def of(cls, controller: Controller, job_id: str, now: float) -> Forecast:
        """The forecast of a submitted job."""
        record = frozen(controller.jobs[job_id])
        return cls(record, controller.snapshot(now), False, _undecided(controller, job_id))

    @classmethod
    def of_new(cls, controller: Controller, spec: JobSpec, now: float) -> Forecast:
        """The forecast of a draft; refuses it like a submission."""
        record = controller.draft(spec, now)
        return cls(record, controller.snapshot(now, record), True, _undecided(controller, spec.id))

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self.record.spec.id

    def shows(self, job_id: str) -> bool:
        """Whether policies would see the job."""
        return any(job.id == job_id for job in self.snapshot.jobs)


def _undecided(controller: Controller, job_id: str) -> tuple[str, ...]:
    earlier = itertools.takewhile(lambda record: record.spec.id != job_id, controller.active.values())
    return tuple(
        record.spec.id for record in earlier if record.is_ready and not record.placement and record.reason is None
    )


def plan_of(forecast: Forecast, snapshot: Snapshot, decision: Decision, jobs: Mapping[str, JobRecord]) -> Plan:
    """The plan from the policy's decision on a snapshot; `jobs` are all known jobs."""
    numbers = plan_from(forecast.record, snapshot, decision, jobs, forecast.undecided)
    return Plan(
        job_id=numbers.job_id,
        starts_now=numbers.starts_now,
        gpus=numbers.gpus,
        low_gpus=numbers.low_gpus,
        high_gpus=numbers.high_gpus,
        behind=numbers.behind,
        eta=times_of(numbers.eta, snapshot.now),
        text=explain_plan(numbers),
    )
