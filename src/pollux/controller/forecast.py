"""What would become of a job if it were submitted now: the policy's own answer, and nothing changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pollux.controller.controller import Controller
from pollux.controller.eta import EtaSeconds, eta, fair_gpus, most_gpus
from pollux.controller.events import JobSpec
from pollux.controller.records import JobRecord
from pollux.core import NOWHERE, Decision, Policy, Reason, Snapshot

__all__ = ["Lack", "PlanNumbers", "lack_of", "plan_for", "plan_from"]


# More names than that say no more to anybody.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a job cannot run on the cluster as it is: what it needs, and what is there for it.

    `suitable` GPUs are of a type that it takes, of `gpu_types` (empty: any); `types` are those on the cluster. `quota`
    is its queue's, None for none.
    """

    needs: int
    suitable: int
    gpu_types: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    quota: int | None = None


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """The plan of one job.

    `gpus` are those it gets at once, 0 if it waits; then `behind` are the jobs in its way. While it runs it is expected
    to hold `low_gpus` to `high_gpus`; 0 to 0 where it cannot run on this cluster as it is, and `lack` says why. `eta`
    is None where no model is known, and `reason` where the policy gives none.
    """

    job_id: str
    gpus: int
    low_gpus: int
    high_gpus: int
    behind: tuple[str, ...] = ()
    reason: Reason | None = None
    eta: EtaSeconds | None = None
    lack: Lack | None = None

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
    record: JobRecord,
    snapshot: Snapshot,
    decision: Decision,
    jobs: Mapping[str, JobRecord] | None = None,
    undecided: Sequence[str] = (),
) -> PlanNumbers:
    """The plan of a job that is new in the snapshot, from what a policy answered to it; `jobs` are all that are known.

    A draft, or a job that was submitted and holds nothing yet. For one that is not ready no policy need be asked.
    Where one of the `undecided`, which came before it, gets nothing in this answer, nobody can promise that the next
    answer does not turn that round: then the job is said to wait behind it.
    """
    spec, limits = record.spec, record.spec.limits
    placement = decision.allocation.get(spec.id, NOWHERE)
    earlier = tuple(job_id for job_id in undecided if not decision.allocation.get(job_id, NOWHERE)) if placement else ()
    if earlier:
        placement = NOWHERE
    gpus = placement.num_gpus
    reason = None if earlier else decision.reasons.get(spec.id, record.reason)
    high = most_gpus(snapshot, limits, spec.queue)
    low = min(max(min(gpus or limits.min_gpus, fair_gpus(snapshot, record)), limits.min_gpus), high)
    behind: tuple[str, ...] = ()
    if not gpus:
        behind = earlier[:_MOST_NAMES] or record.waiting_for or (reason.jobs if reason is not None else ())
    expected = replace(record, placement=placement, reason=reason)
    lack = lack_of(record, snapshot)
    return PlanNumbers(spec.id, gpus, low, high, behind, reason, eta(expected, snapshot, jobs), lack)


def lack_of(record: JobRecord, snapshot: Snapshot) -> Lack | None:
    """What is there for a job beside what it needs, where that is too little; None where it is enough."""
    limits = record.spec.limits
    if most_gpus(snapshot, limits, record.spec.queue):
        return None
    queue = snapshot.queues.get(record.spec.queue)
    suitable = most_gpus(snapshot, replace(limits, min_gpus=1, max_gpus=max(snapshot.cluster.num_gpus, 1)))
    types = tuple(dict.fromkeys(node.gpu_type for node in snapshot.cluster.nodes if node.schedulable and node.gpu_type))
    quota = None if queue is None else queue.gpu_quota
    return Lack(limits.min_gpus, suitable, limits.gpu_types, types, quota)
