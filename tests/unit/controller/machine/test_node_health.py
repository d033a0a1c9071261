"""Nodes on which jobs fail again and again: when they are suspect, what policies see, and how they come back."""

import json

import pytest

from pollux.controller import (
    Controller,
    GenerationEnded,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeSetAside,
    NodeTakenBack,
    TimerFired,
)
from pollux.controller.state.node_trust import FAILED_SCRIPTS, FAILURES_OF_ONE, NodeTrust
from pollux.core import JobLimits, UnknownName
from pollux.core.errors import Conflict
from pollux.policies import create, names
from pollux.testing import FakeOracle, cluster, goodput_model, place
from pollux.wire.job import JobRequest


class Cluster:
    """A controller under the hand, with jobs that fail or do well where the test says."""

    def __init__(self, desk):
        self.desk, self.controller, self.at = desk, desk.controller, 0.0

    def run_on(self, job_id, node, outcome, script="", seconds=5.0):
        """Start the job there, if need be submit it, and let it end after some seconds."""
        if job_id not in self.controller.jobs:
            words = ("python", script or f"{job_id}.py", f"--name={job_id}")
            request = JobRequest(name=job_id, run=words, workdir="/home/ada")
            self.desk(JobSubmitted(self.at, JobSpec(job_id, JobLimits(max_gpus=1), retries=100, request=request)))
        self.at += 1000.0
        if self.controller.next_timer_at is not None and self.controller.next_timer_at <= self.at:
            self.desk(TimerFired(self.at))
        self.desk.decide(self.at, **{job_id: f"{node}:1"})
        generation = self.controller.jobs[job_id].generation
        self.desk(JobRunning(self.at, job_id, generation))
        self.at += seconds
        self.desk(GenerationEnded(self.at, job_id, generation, outcome, "exit 1"))

    @property
    def suspects(self):
        return [node_id for node_id, _ in self.controller.suspects()]


@pytest.fixture
def nodes(make_desk):
    return Cluster(make_desk(cluster(2, 2, 2)))


@pytest.mark.parametrize("outcome", ["crashed", "lost", "refused"])
def test_different_jobs_that_fail_on_one_node_make_it_suspect(nodes, outcome):
    for number in range(FAILED_SCRIPTS):
        assert nodes.suspects == []
        nodes.run_on(f"job-{number}", "n1", outcome)
    assert nodes.suspects == ["n1"]
    assert "3 different scripts failed there" in nodes.controller.suspects()[0][1]


def test_one_that_runs_elsewhere_and_fails_there_makes_it_suspect(nodes):
    nodes.run_on("a", "n0", "stopped", seconds=5000.0)
    for _ in range(FAILURES_OF_ONE):
        assert nodes.suspects == []
        nodes.run_on("a", "n1", "crashed")
    assert nodes.suspects == ["n1"]


def test_a_bad_script_that_fails_everywhere_makes_none_suspect(nodes):
    for turn in range(30):
        nodes.run_on("bad", f"n{turn % 3}", "crashed")
    assert nodes.suspects == []


def test_a_sweep_of_a_bad_script_is_one_script(nodes):
    for number in range(20):
        nodes.run_on(f"trial-{number}", "n0", "crashed", script="train.py")
    assert nodes.suspects == []


def test_scripts_that_fail_on_the_next_node_too_say_nothing_against_the_first(nodes):
    for number in range(FAILED_SCRIPTS):
        nodes.run_on(f"job-{number}", "n1", "crashed")
        nodes.run_on(f"job-{number}", "n2", "crashed")
    assert nodes.suspects == []


@pytest.mark.parametrize("outcome", ["out-of-memory", "stopped"])
def test_what_is_not_the_nodes_doing_does_not_count(nodes, outcome):
    for number in range(10):
        nodes.run_on(f"job-{number}", "n1", outcome)
    assert nodes.suspects == []


def test_a_job_that_does_well_there_clears_the_node(nodes):
    for number in range(FAILED_SCRIPTS - 1):
        nodes.run_on(f"job-{number}", "n1", "crashed")
    nodes.run_on("good", "n1", "succeeded")
    nodes.run_on("job-9", "n1", "crashed")
    assert nodes.suspects == []


def test_the_last_usable_node_is_never_suspect(make_desk):
    alone = Cluster(make_desk(cluster(4)))
    for number in range(10):
        alone.run_on(f"job-{number}", "n0", "crashed")
    assert alone.suspects == []
    two = Cluster(make_desk(cluster(2, 2)))
    for number in range(FAILED_SCRIPTS):
        two.run_on(f"a-{number}", "n0", "crashed")
        two.run_on(f"b-{number}", "n1", "crashed")
    assert len(two.suspects) == 1


@pytest.mark.parametrize("policy", names())
def test_no_policy_places_anything_on_one_that_is_set_aside(policy, make_desk):
    desk = make_desk(cluster(1, 1))
    desk(NodeSetAside(0.0, "n0", "its fan is broken"))
    for job_id in ("a", "b"):
        desk.submit(0.0, job_id, max_gpus=1, oracle=FakeOracle())
        desk.controller.jobs[job_id].goodput, desk.controller.jobs[job_id].remaining = goodput_model(), 1000.0
    snapshot = desk.controller.snapshot(10.0)
    assert [node.schedulable for node in snapshot.cluster.nodes] == [False, True]
    allocation = create(policy).allocate(snapshot).allocation
    assert [str(found) for found in allocation.values() if found] == ["n1:1"]


def test_what_runs_there_stays(desk):
    desk.submit(0.0, "a")
    desk.decide(10.0, a="n0:2")
    assert not [each for each in desk(NodeSetAside(20.0, "n0", "")) if type(each).__name__ == "StopJob"]
    assert desk.controller.jobs["a"].placement == place("n0:2")


def test_it_is_taken_back_and_starts_with_a_clean_record(nodes):
    for number in range(FAILED_SCRIPTS):
        nodes.run_on(f"job-{number}", "n1", "crashed")
    nodes.desk(NodeSetAside(nodes.at, "n1", "jobs fail there"))
    assert nodes.suspects == []
    assert dict(nodes.controller.set_aside) == {"n1": "jobs fail there"}
    nodes.desk(NodeTakenBack(nodes.at, "n1"))
    assert nodes.suspects == []
    assert all(node.schedulable for node in nodes.controller.snapshot(nodes.at).cluster.nodes)


def test_nodes_that_nobody_knows_and_those_in_use_are_refused(desk):
    with pytest.raises(UnknownName, match="nowhere"):
        desk(NodeSetAside(1.0, "nowhere", ""))
    with pytest.raises(UnknownName, match="nowhere"):
        desk(NodeTakenBack(1.0, "nowhere"))
    with pytest.raises(Conflict, match="is in use"):
        desk(NodeTakenBack(1.0, "n0"))


def test_all_of_it_is_kept_over_a_restart_and_states_of_before_are_read(nodes):
    nodes.run_on("good", "n0", "succeeded")
    for number in range(FAILED_SCRIPTS):
        nodes.run_on(f"job-{number}", "n1", "crashed")
    nodes.desk(NodeSetAside(nodes.at, "n2", "its fan is broken"))
    saved = json.loads(json.dumps(nodes.controller.state()))
    restored = Controller.restored(saved, nodes.controller.settings)
    assert dict(restored.set_aside) == {"n2": "its fan is broken"}
    assert restored.suspects() == nodes.controller.suspects() != []
    assert restored.state() == nodes.controller.state()
    del saved["trust"]
    assert Controller.restored(saved, nodes.controller.settings).set_aside == {}


def test_what_is_known_of_scripts_stays_small():
    trust = NodeTrust()
    for number in range(2000):
        trust.note_failure("n0", f"script {number}")
        trust.note_good("n1", f"script {number}")
    state = trust.state()
    assert len(state["failures"]["n0"]) == len(state["good"]) == 500
