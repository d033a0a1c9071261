"""Tests that every policy must pass; its author inherits them.

    class TestMine(PolicyConformance):
        def policy(self) -> Policy:
            return Mine()

The snapshots are those of `policy_cases`; `strategies` has random ones.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    Event,
    JobPaused,
    JobResumed,
    JobSpec,
    JobState,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.core import (
    NOWHERE,
    BatchMode,
    Decision,
    JobLimits,
    JobView,
    Node,
    Placement,
    Policy,
    Queue,
    Snapshot,
    check,
)
from pollux.testing.builders import FakeOracle, after, cluster, goodput_model, place, snapshot
from pollux.testing.conformance.policy_cases import CASES, known_job
from pollux.testing.driver import FakeDriver, FakeWork

__all__ = ["PolicyConformance"]


def _in_every_case(test: Callable[[Any, str], None]) -> Callable[..., None]:
    """Runs one test for all cases, since pytest takes longer for a test than a policy for a decision."""

    def in_every_case(self: PolicyConformance, *cases: str) -> None:
        for case in cases or sorted(CASES):
            try:
                test(self, case)
            except Exception as error:
                error.add_note(f"in the case '{case}'")
                raise

    in_every_case.__doc__ = test.__doc__
    return in_every_case


_FOREIGN_MEMORIES = (
    0, "text", b"", (), ("j0", "j1"), ((),), (("j0", "j0"), ("j1",)), [[1, 2], [3]], {"j0": {"n0": 4}},
    {1, 2}, object(), 1.5, True, (1, 2), {"version": 1}, [None],
)  # fmt: skip


class PolicyConformance(ABC):
    """Inherit, and define `policy`.

    `work_conserving`: no job waits while GPUs that it could use are idle. `stable`: when only its own decisions change
    the cluster, its decisions stay the same after `rounds_to_settle` rounds.
    """

    work_conserving = True
    stable = True
    rounds_to_settle = 6

    @abstractmethod
    def policy(self) -> Policy:
        """A new instance; called many times."""

    # What it declares

    def test_it_declares_what_drivers_ask(self) -> None:
        """Name, needs and batch mode are values that drivers know."""
        policy = self.policy()
        assert policy.name
        known = {"goodput", "oracle", "prior", "remaining", "kind", "group", "deadline", "loss_history"}
        assert policy.needs <= known | {"utilization", "memory_bytes"}
        assert policy.batch in get_args(BatchMode)

    # In every situation

    @_in_every_case
    def test_decision_is_legal(self, case: str) -> None:
        """`check` finds no violation."""
        situation = CASES[case]()
        _assert_legal(situation, self.policy().allocate(situation))

    @_in_every_case
    def test_same_snapshot_same_decision(self, case: str) -> None:
        """A policy is a function: no hidden state, no unseeded chance."""
        policy = self.policy()
        first = policy.allocate(CASES[case]())
        assert policy.allocate(CASES[case]()) == first, "the second call of one instance differs"
        assert self.policy().allocate(CASES[case]()) == first, "a new instance differs"

    @_in_every_case
    def test_own_memory_keeps_it_legal_and_repeatable(self, case: str) -> None:
        """Decisions with its own memory are legal, and reading the memory does not change it."""
        situation = CASES[case]()
        remembering = replace(situation, memory=self.policy().allocate(situation).memory)
        decision = self.policy().allocate(remembering)
        _assert_legal(remembering, decision)
        assert self.policy().allocate(remembering) == decision, "the memory was changed in place"

    @_in_every_case
    def test_memory_of_another_time_does_no_harm(self, case: str) -> None:
        """Jobs and nodes may have come and gone since the memory was kept."""
        memory = self.policy().allocate(CASES[case]()).memory
        for other in ("far-more-jobs-than-gpus", "uneven-nodes", "no-jobs", "no-nodes", "two-gpu-types"):
            situation = replace(CASES[other](), memory=memory)
            _assert_legal(situation, self.policy().allocate(situation))

    @_in_every_case
    def test_snapshot_is_left_alone(self, case: str) -> None:
        """Policies get the driver's own snapshot, not a copy."""
        situation = CASES[case]()
        before = replace(situation, running=dict(situation.running), queues=dict(situation.queues))
        self.policy().allocate(situation)
        assert situation == before

    @_in_every_case
    def test_answer_is_plain_data(self, case: str) -> None:
        """Reasons can be stored and sent: words, and finite numbers about jobs of the snapshot."""
        situation = CASES[case]()
        decision = self.policy().allocate(situation)
        desired = decision.desired_nodes
        assert desired is None or (isinstance(desired, int) and desired >= 0)
        assert set(decision.reasons) <= {job.id for job in situation.jobs}
        for job_id, reason in decision.reasons.items():
            assert isinstance(reason.code, str)
            assert reason.code
            for name, number in reason.numbers.items():
                finite = isinstance(number, int | float) and math.isfinite(number)
                assert finite, f"'{job_id}': {reason.code}: {name} is {number!r}; give a finite int or float"
            json.dumps([reason.code, dict(reason.numbers)], allow_nan=False)

    @_in_every_case
    def test_it_settles_when_nothing_changes(self, case: str) -> None:
        """Once its decisions are carried out, it changes nothing more."""
        if not self.stable:
            return
        situation = CASES[case]()
        history = []
        for _ in range(self.rounds_to_settle):
            decision = self.policy().allocate(situation)
            _assert_legal(situation, decision)
            history.append(_placed(decision))
            situation = after(situation, decision)
        assert history[-1] == history[-2], f"still moving in round {self.rounds_to_settle}: {history}"

    def test_foreign_memory_is_ignored(self) -> None:
        """Memory may come from another policy, or another version of this one."""
        for memory, case in itertools.product(
            _FOREIGN_MEMORIES, ("far-more-jobs-than-gpus", "pinned", "two-gpu-types")
        ):
            situation = replace(CASES[case](), memory=memory)
            _assert_legal(situation, self.policy().allocate(situation))

    # One thing at a time

    def test_without_jobs_or_nodes_nothing_is_placed(self) -> None:
        """Snapshots without jobs, nodes or both."""
        for case in ("nothing", "no-jobs", "no-nodes"):
            assert _placed(self.policy().allocate(CASES[case]())) == {}

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_a_single_job_runs(self, size: int) -> None:
        """An idle cluster runs every job that fits."""
        decision = self.policy().allocate(snapshot(cluster(4, 4), [_rigid("j", size)]))
        assert _where(decision, "j").num_gpus >= size

    def test_a_job_that_fits_nowhere_stands_in_nobodys_way(self) -> None:
        """It waits; the others run."""
        for misfit in (
            _rigid("misfit", 16),
            known_job("misfit", gpu_types=("h100",), requested_gpus=4),
            known_job("misfit", cpus_per_gpu=100.0, requested_gpus=4),
            known_job("misfit", memory_bytes_per_gpu=1e15, requested_gpus=4),
            known_job("misfit", max_nodes=1, min_gpus=5, requested_gpus=5),
        ):
            nodes = cluster(4, 4, num_cpus=32, memory_bytes=1e12, gpu_type="a100")
            others = [_rigid("runs", 4, 5.0), _rigid("waits", 4, 6.0)]
            situation = snapshot(nodes, [misfit, *others], {"runs": "n0:4"})
            placed = _placed(self.policy().allocate(situation))
            assert set(placed) == {"runs", "waits"}, f"{misfit.limits} kept others from running"

    def test_a_pinned_job_stays_whoever_waits(self) -> None:
        """It is neither moved nor resized, although others wait."""
        jobs = [_rigid(f"j{index}", 4, attained_gpu_seconds=0.0) for index in range(4)]
        pinned = known_job("pinned", 590.0, pinned=True, attained_gpu_seconds=1e7, num_restarts=50)
        situation = snapshot(cluster(4, 4), [*jobs, pinned], {"pinned": "n1:1 n0:1"})
        assert _where(self.policy().allocate(situation), "pinned") == place("n1:1 n0:1")

    def test_a_steady_job_is_not_stopped_whoever_waits(self) -> None:
        """A job that is not preemptible keeps at least its minimum."""
        jobs = [_rigid(f"j{index}", 4, attained_gpu_seconds=0.0) for index in range(4)]
        steady = known_job("steady", 590.0, preemptible=False, attained_gpu_seconds=1e7, min_gpus=2)
        situation = snapshot(cluster(4, 4), [*jobs, steady], {"steady": "n0:4"})
        assert _where(self.policy().allocate(situation), "steady").num_gpus >= 2

    def test_a_steady_job_above_a_lowered_maximum_shrinks(self) -> None:
        """Not preemptible means not stopped; its limits still hold."""
        steady = known_job("steady", preemptible=False, max_gpus=2, requested_gpus=2)
        decision = self.policy().allocate(snapshot(cluster(4, 4), [steady], {"steady": "n0:4"}))
        assert 1 <= _where(decision, "steady").num_gpus <= 2

    def test_a_job_of_one_type_does_not_span_two(self) -> None:
        """Three GPUs of two types are no place for a job of three."""
        nodes = (*cluster(2, gpu_type="a100").nodes, Node("t0", 2, "t4"))
        situation = snapshot(replace(cluster(), nodes=nodes), [_rigid("j", 3)])
        assert _placed(self.policy().allocate(situation)) == {}

    def test_a_closed_node_takes_nothing_new(self) -> None:
        """The rest of the cluster is used all the same."""
        nodes = replace(cluster(), nodes=(Node("closed", 8, schedulable=False), Node("open", 4)))
        jobs = [_rigid(f"j{index}", 2) for index in range(4)]
        decision = self.policy().allocate(snapshot(nodes, jobs, {"j0": "closed:2"}))
        used = {node for job in jobs[1:] for node, _ in _where(decision, job.id)}
        assert used == {"open"}

    def test_a_quota_holds_and_leaves_the_rest_to_others(self) -> None:
        """One full queue does not stop another."""
        jobs = [_rigid(f"{name}{i}", 1, float(i), queue=name, max_gpus=1) for name in "ab" for i in range(4)]
        situation = snapshot(cluster(4, 4), jobs, queues=[Queue("a", gpu_quota=2)])
        placed = _placed(self.policy().allocate(situation))
        assert sum(job_id.startswith("a") for job_id in placed) <= 2
        if self.work_conserving:
            assert {"b0", "b1", "b2", "b3"} <= set(placed)

    # Work conservation

    @pytest.mark.parametrize(
        ("shape", "sizes"),
        [
            ((4,), (1,) * 6),
            ((4, 4), (1,) * 3),
            ((4, 4), (2,) * 6),
            ((4, 4, 4, 4), (4,) * 6),
            ((4, 4, 4), (4, 2, 2, 1, 1, 1, 1)),
            ((4, 4, 4), (1, 1, 1, 1, 2, 2, 4, 4)),
            ((8, 8), (1, 2, 4, 8, 1, 2, 4, 8)),
        ],
        ids=str,
    )
    def test_no_job_waits_while_gpus_that_it_could_use_are_idle(
        self, shape: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Jobs ask for their minimums, on equal nodes into which all jobs fit."""
        if not self.work_conserving:
            return
        jobs = [_rigid(f"j{index}", size, 5.0 * index) for index, size in enumerate(sizes)]
        situation = snapshot(cluster(*shape), jobs)
        for _ in range(2):
            decision = self.policy().allocate(situation)
            placed = _placed(decision)
            idle = sum(shape) - sum(place(text).num_gpus for text in placed.values())
            waiting = {job.id: job.limits.min_gpus for job in jobs if job.id not in placed}
            assert all(least > idle for least in waiting.values()), f"{idle} GPUs idle, {waiting} wait"
            # The first placed job ends; the others go on.
            situation = after(situation, decision, 60.0)
            jobs = [job for job in situation.jobs if job.id != next(iter(placed))]
            running = {job.id: situation.running[job.id] for job in jobs if job.id in situation.running}
            situation = replace(situation, jobs=tuple(jobs), running=running)

    # With a controller

    @pytest.mark.parametrize("trigger", ["rounds", "events"])
    def test_all_jobs_of_a_small_workload_end(self, trigger: str) -> None:
        """Through a controller: arrivals, a failure, a pause, nodes that come and go."""
        settings = ControllerSettings(trigger, interval_seconds=60.0)  # type: ignore[arg-type]
        controller = Controller(cluster(4, 4), settings)
        work = {f"job-{index}": _work(index) for index in range(8)}
        FakeDriver(controller, self.policy(), _story(work), work).run()
        states = {job_id: record.state for job_id, record in controller.jobs.items()}
        expected = {job_id: JobState(fake.outcome) for job_id, fake in work.items()}
        assert states == expected
        for index, record in enumerate(controller.jobs.values()):
            assert record.attained_gpu_seconds >= _work(index).gpu_seconds
            assert not record.placement


def _rigid(job_id: str, size: int, submitted_at: float = 0.0, **fields: object) -> JobView:
    """A job that asks for exactly its minimum."""
    return known_job(job_id, submitted_at, **{"min_gpus": size, "requested_gpus": size, **fields})


def _work(index: int) -> FakeWork:
    return FakeWork(300.0 + 200.0 * index, "failed" if index == 5 else "succeeded", goodput_model())


def _story(work: dict[str, FakeWork]) -> Iterator[Event]:
    """Jobs of every kind arrive; a node joins, another is lost, a job is paused for a while."""
    kinds = itertools.cycle(
        [JobLimits(max_gpus=8), JobLimits(2, 4), JobLimits(pinned=True), JobLimits(preemptible=False)]
    )
    for index, (job_id, limits) in enumerate(zip(work, kinds, strict=False)):
        queue = "small" if index % 3 == 0 else ""
        oracle = FakeOracle(steps=work[job_id].gpu_seconds)
        spec = JobSpec(job_id, limits, requested_gpus=1 + index % 4, queue=queue, oracle=oracle)
        yield JobSubmitted(37.0 * index, spec)
    yield QueueChanged(0.0, Queue("small", gpu_quota=4))
    yield NodeAdded(200.0, Node("n2", 4))
    yield JobPaused(300.0, "job-3")
    yield NodeRemoved(400.0, "n0")
    yield JobResumed(500.0, "job-3")


def _placed(decision: Decision) -> dict[str, str]:
    return {job_id: str(placement) for job_id, placement in decision.allocation.items() if placement}


def _where(decision: Decision, job_id: str) -> Placement:
    return decision.allocation.get(job_id, NOWHERE)


def _assert_legal(situation: Snapshot, decision: Decision) -> None:
    violations = [str(violation) for violation in check(situation, decision)]
    assert not violations, f"illegal: {'; '.join(violations)}; decided {_placed(decision)}"
