"""A job that fails again and again: how often it makes others give way, under every policy, in rounds and live."""

import dataclasses
import json
import math
from itertools import pairwise

import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    DecisionMade,
    GenerationEnded,
    JobReported,
    JobRunning,
    JobSpec,
    JobSubmitted,
    ResizeJob,
    StartJob,
    StopJob,
    TimerFired,
)
from pollux.controller.explanations.explain import explain
from pollux.controller.machine.returns import RETURN_PERIOD_SECONDS
from pollux.core import NOWHERE, JobLimits, check
from pollux.policies import create, names
from pollux.testing import FakeOracle, cluster, goodput_model

RUN_SECONDS = 3.0
OUTCOMES = ("crashed", "out-of-memory", "lost", "refused")


class Crashing:
    """A controller, a policy, jobs that run on and jobs that fail some seconds after each of their starts."""

    def __init__(self, policy, trigger, nodes=None, **settings):
        self.controller = Controller(nodes or cluster(2), ControllerSettings(trigger=trigger, **settings))
        self.policy = create(policy)
        self.failing = {}
        self.gave_way = []
        self.starts = []
        self._crashes = {}
        self.controller.start(0.0)

    def submit(self, at, job_id, fails="", **limits):
        spec = JobSpec(job_id, JobLimits(**limits), limits.get("max_gpus", 1), oracle=FakeOracle(), retries=1000)
        self.apply(JobSubmitted(at, spec))
        self.apply(JobReported(at, job_id, goodput_model(), 1e6, progress=at))
        if fails:
            self.failing[job_id] = fails

    def apply(self, event):
        for command in self.controller.apply(event):
            if isinstance(command, StartJob | ResizeJob):
                self._goes_on(command, event.at)
            elif isinstance(command, StopJob):
                self._crashes.pop(command.job_id, None)

    def _goes_on(self, command, at):
        if self.failing.get(command.job_id) != "refused":
            self.apply(JobRunning(at, command.job_id, command.generation))
        if command.job_id in self.failing:
            self.starts.append((at, command.job_id))
            self._crashes[command.job_id] = at + RUN_SECONDS

    def _decide(self, at):
        seen = self.controller.snapshot(at)
        decision = self.policy.allocate(seen)
        assert not check(seen, decision)
        before = {job_id: record.placement.num_gpus for job_id, record in self.controller.active.items()}
        self.apply(DecisionMade(at, seen.revision, decision))
        for job_id, held in before.items():
            if job_id not in self.failing and self.controller.jobs[job_id].placement.num_gpus < held:
                self.gave_way.append(at)

    def run(self, until):
        while True:
            controller = self.controller
            due = controller.next_decision_at
            times = [due, controller.next_timer_at, *self._crashes.values()]
            now = min((at for at in times if at is not None), default=math.inf)
            if now > until:
                return self
            for job_id in [job_id for job_id, at in self._crashes.items() if at <= now]:
                del self._crashes[job_id]
                generation = controller.jobs[job_id].generation
                self.apply(GenerationEnded(now, job_id, generation, self.failing[job_id], "exit 1"))
            if controller.next_timer_at is not None and controller.next_timer_at <= now:
                self.apply(TimerFired(now))
            if controller.next_decision_at is not None and controller.next_decision_at <= now:
                self._decide(now)


@pytest.mark.parametrize("trigger", ["events", "rounds"])
@pytest.mark.parametrize("policy", names())
def test_jobs_give_way_to_one_that_fails_at_most_once_in_a_period(policy, trigger):
    """Its first start and its first return may take GPUs from others, and then one return in each period."""
    is_slow = policy == "pollux-genetic"
    for outcome in OUTCOMES[:1] if is_slow else OUTCOMES:
        world = Crashing(policy, trigger, interval_seconds=5.0, min_gap_seconds=2.0)
        world.submit(0.0, "steady", max_gpus=2)
        world.run(20.0)
        world.submit(20.0, "broken", fails=outcome, max_gpus=2)
        world.run(60.0 if is_slow else 1000.0)
        returns = world.gave_way[1:]
        gaps = [after - before for before, after in pairwise(returns)]
        assert all(gap >= RETURN_PERIOD_SECONDS for gap in gaps), (outcome, world.gave_way)


@pytest.mark.parametrize("policy", ["pollux", "castor"])
def test_one_that_fails_may_use_free_gpus_as_soon_as_its_pause_is_over(policy):
    world = Crashing(policy, "events", nodes=cluster(4))
    world.submit(0.0, "steady", max_gpus=2)
    world.submit(0.0, "broken", fails="crashed", max_gpus=2)
    world.run(100.0)
    assert len(world.starts) >= 5, "its pauses are 2, 4, 8, 16 and 32 seconds"
    assert world.gave_way == []


def test_one_that_waits_says_for_what():
    world = Crashing("pollux", "events")
    world.submit(0.0, "steady", max_gpus=2)
    world.run(20.0)
    world.submit(20.0, "broken", fails="crashed", max_gpus=2)
    world.run(100.0)
    record = world.controller.jobs["broken"]
    assert (record.reason.code, record.placement, record.eligible_at) == ("backoff-free-gpus", NOWHERE, None)
    text, step = explain(record.reason, record)
    assert "it starts on free GPUs" in text
    assert step == "pollux logs broken"
    assert [job.id for job in world.controller.snapshot(100.0).jobs] == ["steady"]


def test_one_that_came_back_and_runs_takes_no_gpus_from_others_before_the_period_is_over():
    world = Crashing("pollux", "events", nodes=cluster(3))
    world.submit(0.0, "steady", max_gpus=2)
    world.submit(0.0, "broken", fails="crashed", max_gpus=3)
    world.run(15.0)
    del world.failing["broken"]
    world.run(60.0)
    shown = {job.id: job.limits.max_gpus for job in world.controller.snapshot(60.0).jobs}
    held = {job_id: record.placement.num_gpus for job_id, record in world.controller.active.items()}
    assert held["broken"]
    assert shown == {"steady": 2, "broken": 3 - held["steady"]}
    world.run(400.0)
    assert {job.id: job.limits.max_gpus for job in world.controller.snapshot(400.0).jobs}["broken"] == 3


def test_what_a_quota_leaves_free_counts():
    from pollux.core import Queue

    world = Crashing("pollux", "events", nodes=cluster(4))
    controller = world.controller
    controller._cluster_state.set_queue(Queue("small", gpu_quota=2))
    for job_id in ("steady", "broken"):
        spec = JobSpec(job_id, JobLimits(max_gpus=2), 2, queue="small", retries=1000)
        if job_id == "broken":
            world.run(20.0)
            world.failing[job_id] = "crashed"
        world.apply(JobSubmitted(0.0 if job_id == "steady" else 20.0, spec))
        world.apply(JobReported(20.0, job_id, goodput_model(), 1e6))
    world.run(300.0)
    assert len(world.gave_way) <= 2


def test_it_is_kept_over_a_restart_and_states_of_before_are_read():
    world = Crashing("pollux", "events")
    world.submit(0.0, "steady", max_gpus=2)
    world.run(20.0)
    world.submit(20.0, "broken", fails="crashed", max_gpus=2)
    world.run(100.0)
    saved = json.loads(json.dumps(world.controller.state()))
    restored = Controller.restored(saved, world.controller.settings)
    assert restored.jobs["broken"].quiet_until == world.controller.jobs["broken"].quiet_until > 100.0
    assert restored.next_timer_at == world.controller.next_timer_at
    for job in saved["jobs"]:
        del job["quiet_until"]
    assert Controller.restored(saved, world.controller.settings).jobs["broken"].quiet_until is None


def test_a_decision_of_before_that_gave_it_gpus_is_no_broken_one():
    """Logs of earlier versions have such decisions; what policies are shown now is no reason to refuse them."""
    world = Crashing("pollux", "events")
    world.submit(0.0, "steady", max_gpus=2)
    world.run(20.0)
    world.submit(20.0, "broken", fails="crashed", max_gpus=2)
    world.run(100.0)
    seen = world.controller._whole_snapshot(101.0)
    decision = create("pollux").allocate(dataclasses.replace(seen, memory=None))
    assert decision.allocation["broken"]
    world.apply(DecisionMade(101.0, seen.revision, decision))
    assert world.controller.jobs["broken"].placement
