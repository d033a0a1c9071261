"""What would become of a job if it were submitted now: the policy's own answer, and nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pollux.controller.controller import Controller
from pollux.controller.eta import EtaSeconds, eta, fair_gpus, most_gpus
from pollux.controller.events import JobSpec
from pollux.controller.records import JobRecord
from pollux.core import NOWHERE, Decision, Policy, Reason, Snapshot

__all__ = ["PlanNumbers", "plan_for", "plan_from"]


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """The plan of one job.

    `gpus` are those it gets at once, 0 if it waits; then `behind` are the jobs in its way. While it runs it is expected
    to hold `low_gpus` to `high_gpus`; 0 to 0 where it can never run on this cluster. `eta` is None where no model is
    known, and `reason` where the policy gives none.
    """

    job_id: str
    gpus: int
    low_gpus: int
    high_gpus: int
    behind: tuple[str, ...] = ()
    reason: Reason | None = None
    eta: EtaSeconds | None = None

    @property
    def starts_now(self) -> bool:
        """Whether it gets GPUs at once."""
        return self.gpus > 0


def plan_for(controller: Controller, policy: Policy, spec: JobSpec, now: float) -> PlanNumbers:
    """The policy asked on a snapshot with the new job in it; refuses what a submission would be refused for."""
    record = controller.draft(spec, now)
    snapshot = controller.snapshot(now, record)
    decision = policy.allocate(snapshot) if record.is_ready else Decision({})
    return plan_from(record, snapshot, decision, controller.jobs)


def plan_from(
    record: JobRecord, snapshot: Snapshot, decision: Decision, jobs: Mapping[str, JobRecord] | None = None
) -> PlanNumbers:
    """The plan of a job that is new in the snapshot, from what a policy answered to it; `jobs` are all that are known.

    A draft, or a job that was submitted and holds nothing yet. For one that is not ready no policy need be asked.
    """
    spec, limits = record.spec, record.spec.limits
    gpus = decision.allocation.get(spec.id, NOWHERE).num_gpus
    reason = decision.reasons.get(spec.id, record.reason)
    high = most_gpus(snapshot, limits, spec.queue)
    low = min(max(min(gpus or limits.min_gpus, fair_gpus(snapshot, record)), limits.min_gpus), high)
    behind: tuple[str, ...] = ()
    if not gpus:
        behind = record.waiting_for or (reason.jobs if reason is not None else ())
    expected = replace(record, placement=decision.allocation.get(spec.id, NOWHERE), reason=reason)
    return PlanNumbers(spec.id, gpus, low, high, behind, reason, eta(expected, snapshot, jobs))
