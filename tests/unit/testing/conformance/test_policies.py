"""The suite itself: a policy with one fault must not get through."""

import itertools
import math
from dataclasses import replace

import pytest

from pollux.core import BatchMode, Decision, Placement, Policy, Reason
from pollux.policies import create
from pollux.testing.conformance.policies import PolicyConformance
from pollux.testing.conformance.policy_cases import CASES


class Backfilling:
    """A sound policy; each fault below is one change to it."""

    name = "faulty"
    needs: frozenset[str] = frozenset()
    batch: BatchMode = "fixed"

    def allocate(self, snapshot):
        return create("fifo", strict=False).allocate(snapshot)


class Overcommits(Backfilling):
    def allocate(self, snapshot):
        decision = super().allocate(snapshot)
        first = snapshot.cluster.nodes[:1]
        return replace(decision, allocation={job.id: Placement(((first[0].id, 1),)) for job in snapshot.jobs if first})


class MovesThePinned(Backfilling):
    def allocate(self, snapshot):
        return super().allocate(replace(snapshot, running={}))


class Forgetful(Backfilling):
    """Decides by a count of its own calls."""

    calls = itertools.count()

    def allocate(self, snapshot):
        return super().allocate(snapshot) if next(self.calls) % 2 else Decision(dict(snapshot.running))


class Scribbles(Backfilling):
    def allocate(self, snapshot):
        snapshot.running.clear()
        return super().allocate(snapshot)


class TrustsMemory(Backfilling):
    def allocate(self, snapshot):
        allocation = snapshot.memory or super().allocate(snapshot).allocation
        return Decision(allocation, memory=allocation)


class UsesMemoryUp(Backfilling):
    def allocate(self, snapshot):
        memory = snapshot.memory if isinstance(snapshot.memory, list) else ["first"]
        allocation = super().allocate(snapshot).allocation if memory else {}
        memory.clear()
        return Decision(allocation, memory=["next"])


class Idle(Backfilling):
    def allocate(self, snapshot):
        immovable = [job.id for job in snapshot.jobs if job.limits.pinned or not job.limits.preemptible]
        return Decision({job_id: where for job_id, where in snapshot.running.items() if job_id in immovable})


class Restless(Backfilling):
    """Swaps the order of nodes of distributed jobs in every round."""

    def allocate(self, snapshot):
        decision = super().allocate(snapshot)
        pinned = {job.id for job in snapshot.jobs if job.limits.pinned or not job.limits.preemptible}
        turned = {
            job_id: where if job_id in pinned else Placement(where.shares[::-1])
            for job_id, where in decision.allocation.items()
        }
        return replace(decision, allocation=turned)


class SaysNan(Backfilling):
    def allocate(self, snapshot):
        return Decision({}, reasons={job.id: Reason("odd", {"share": math.nan}) for job in snapshot.jobs})


class SaysMinusOneNode(Backfilling):
    def allocate(self, snapshot):
        return replace(super().allocate(snapshot), desired_nodes=-1)


class Unfair(Backfilling):
    """Gives up on everybody as soon as one job fits nowhere."""

    def allocate(self, snapshot):
        decision = super().allocate(snapshot)
        hopeless = any(reason.code == "fits-nowhere" for reason in decision.reasons.values())
        return Idle().allocate(snapshot) if hopeless else decision


class WithoutMode(Backfilling):
    batch = "sometimes"  # type: ignore[assignment]


def suite_of(policy: type[Backfilling]) -> PolicyConformance:
    class Suite(PolicyConformance):
        def policy(self) -> Policy:
            return policy()

    return Suite()


@pytest.mark.parametrize(
    ("policy", "test", "arguments"),
    [
        (Overcommits, "test_decision_is_legal", ["far-more-jobs-than-gpus"]),
        (MovesThePinned, "test_decision_is_legal", ["pinned"]),
        (MovesThePinned, "test_a_pinned_job_stays_whoever_waits", []),
        (Idle, "test_a_single_job_runs", [1]),
        (Idle, "test_no_job_waits_while_gpus_that_it_could_use_are_idle", [(4,), (1, 1)]),
        (Idle, "test_all_jobs_of_a_small_workload_end", ["rounds"]),
        (Forgetful, "test_same_snapshot_same_decision", ["one-waits"]),
        (Scribbles, "test_snapshot_is_left_alone", ["one-runs"]),
        (TrustsMemory, "test_memory_of_another_time_does_no_harm", ["far-more-jobs-than-gpus"]),
        (UsesMemoryUp, "test_own_memory_keeps_it_legal_and_repeatable", ["one-waits"]),
        (Restless, "test_it_settles_when_nothing_changes", ["shared-networks"]),
        (SaysNan, "test_answer_is_plain_data", ["one-waits"]),
        (SaysMinusOneNode, "test_answer_is_plain_data", ["no-jobs"]),
        (Unfair, "test_a_job_that_fits_nowhere_stands_in_nobodys_way", []),
        (WithoutMode, "test_it_declares_what_drivers_ask", []),
    ],
)
def test_a_fault_is_found(policy, test, arguments):
    getattr(suite_of(Backfilling), test)(*arguments)
    with pytest.raises(AssertionError):
        getattr(suite_of(policy), test)(*arguments)


def test_claims_can_be_dropped():
    suite = suite_of(Idle)
    suite.work_conserving = False
    suite.test_no_job_waits_while_gpus_that_it_could_use_are_idle((4,), (1, 1))
    suite = suite_of(Restless)
    suite.stable = False
    suite.test_it_settles_when_nothing_changes("shared-networks")


@pytest.mark.parametrize("case", sorted(CASES))
def test_cases_are_built_anew(case):
    first, second = CASES[case](), CASES[case]()
    assert first == second
    assert first.running is not second.running
    assert set(first.running) <= {job.id for job in first.jobs}
