"""The plan of a job as if submitted now, from the policy's own answer; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pollux.controller.explanations.eta import EtaSeconds, eta, fair_gpus, most_gpus
from pollux.controller.messages.events import JobSpec
from pollux.controller.state.records import JobRecord
from pollux.core import NOWHERE, Decision, Reason, Snapshot
from pollux.policies.packing.empty_cluster import Whole

__all__ = ["PlanNumbers", "lack_of", "plan_from"]


# More names would not help a reader.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class PlanNumbers:
    """The plan of one job.

    `gpus` is what it gets at once; 0 if it waits, `behind` the jobs that hold the GPUs. While it runs it is expected
    to hold `low_gpus` to `high_gpus`; both are 0 if it cannot run on the present cluster, and `lack` says why. `eta` is
    None without a model; `reason` is None if the policy gives none.
    """

    job_id: str
    gpus: int
    low_gpus: int
    high_gpus: int
    behind: tuple[str, ...] = ()
    reason: Reason | None = None
    eta: EtaSeconds | None = None
    lack: Reason | None = None

    @property
    def starts_now(self) -> bool:
        """Whether it gets GPUs at once."""
        return self.gpus > 0


def plan_from(
    record: JobRecord,
    snapshot: Snapshot,
    decision: Decision,
    jobs: Mapping[str, JobRecord] | None = None,
    undecided: Sequence[str] = (),
) -> PlanNumbers:
    """The plan of a job from a policy's `decision` on the snapshot; `jobs` are all known jobs.

    The job is a draft, or was submitted and holds no GPUs yet; if it is not ready, the decision may be empty. If one of
    the earlier, `undecided` jobs gets nothing in this decision though it could run, the next decision may prefer it:
    then this job waits behind that one.
    """
    spec, limits = record.spec, record.spec.limits
    placement = decision.allocation.get(spec.id, NOWHERE)
    earlier = _contenders(spec, snapshot, decision, undecided) if placement else ()
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


def _contenders(spec: JobSpec, snapshot: Snapshot, decision: Decision, undecided: Sequence[str]) -> tuple[str, ...]:
    """The `undecided` jobs that got nothing and may still take the job's GPUs.

    Jobs that cannot run on this cluster, or that wait for the quota of another queue, cannot.
    """
    views, whole = {job.id: job for job in snapshot.jobs}, Whole(snapshot.cluster)
    found = []
    for job_id in undecided:
        view, reason = views.get(job_id), decision.reasons.get(job_id)
        if decision.allocation.get(job_id, NOWHERE):
            continue
        if view is not None and whole.lacks(view.limits, snapshot.queues.get(view.queue)):
            continue
        code = "" if reason is None else reason.code
        elsewhere = view is not None and view.queue != spec.queue
        if code != "fits-nowhere" and not (code == "waits-for-quota" and elsewhere):
            found.append(job_id)
    return tuple(found)


def lack_of(record: JobRecord, snapshot: Snapshot) -> Reason | None:
    """Why the job cannot run on the present cluster, as a reason with the numbers; None if it can."""
    lacks = Whole(snapshot.cluster).lacks(record.spec.limits, snapshot.queues.get(record.spec.queue))
    return Reason("fits-nowhere", lacks) if lacks else None
