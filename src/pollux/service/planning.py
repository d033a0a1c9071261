"""The plan that a submitter is shown: the policy's own answer for the job, in numbers and one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from pollux.controller import Controller, JobRecord, JobSpec
from pollux.controller.explain import explain_plan
from pollux.controller.forecast import plan_from
from pollux.core import Decision, Policy, Snapshot
from pollux.service.board import frozen
from pollux.service.estimates import times_of
from pollux.wire.status import Plan

__all__ = ["Forecast", "plan_of"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """A job and a snapshot that has it, taken in the engine's thread; the policy is asked elsewhere."""

    record: JobRecord
    snapshot: Snapshot

    @classmethod
    def of(cls, controller: Controller, job_id: str, now: float) -> Forecast:
        """Of a job that is there."""
        return cls(frozen(controller.jobs[job_id]), controller.snapshot(now))

    @classmethod
    def of_new(cls, controller: Controller, spec: JobSpec, now: float) -> Forecast:
        """Of a job that may be submitted; refuses what a submission would be refused for."""
        record = controller.draft(spec, now)
        return cls(record, controller.snapshot(now, record))


def plan_of(forecast: Forecast, policy: Policy) -> Plan:
    """Ask the policy; takes as long as a decision."""
    record, snapshot = forecast.record, forecast.snapshot
    decides = record.is_ready and any(job.id == record.spec.id for job in snapshot.jobs)
    numbers = plan_from(record, snapshot, policy.allocate(snapshot) if decides else Decision({}))
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
