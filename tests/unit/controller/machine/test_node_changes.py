"""What happens to nodes, applied to the state of a cluster alone: no clock of decisions, no policy."""

import pytest

from pollux.controller import JobSpec, JobState, NodeAdded, NodeRemoved, NodeSetAside, NodeTakenBack, ResizeJob, StopJob
from pollux.controller.machine import node_changes
from pollux.controller.state.cluster_state import ClusterState
from pollux.core import NOWHERE, JobLimits, Node, UnknownName
from pollux.core.errors import Conflict
from pollux.testing import cluster, place


@pytest.fixture
def state():
    return ClusterState(cluster(2, 2))


def running(state, where, live=True, **limits):
    record = state.draft(JobSpec("a", JobLimits(**{"max_gpus": 4, **limits})), 0.0)
    state.add(record)
    state.place(record, place(where), 1.0)
    record.state, record.live = JobState.RUNNING, live
    return record


def test_a_node_joins(state):
    assert node_changes.apply(state, NodeAdded(5.0, Node("n9", 8))) == []
    assert "n9" in state.cluster.by_id


def test_a_live_job_goes_on_without_the_node(state):
    record = running(state, "n0:2 n1:1")
    commands = node_changes.apply(state, NodeRemoved(5.0, "n1"))
    assert commands == [ResizeJob("a", 2, place("n0:2 n1:1"), place("n0:2"))]
    assert (record.state, record.reason.code) == (JobState.RESIZING, "left-node")
    assert record.reason.numbers == {"gpus_before": 3.0, "gpus_after": 2.0}


@pytest.mark.parametrize("kind", [{"live": False}, {"pinned": True}, {"min_gpus": 3}])
def test_another_job_is_stopped_and_waits(state, kind):
    record = running(state, "n0:2 n1:1", **kind)
    commands = node_changes.apply(state, NodeRemoved(5.0, "n1"))
    assert commands == [StopJob("a", 2, place("n0:2 n1:1"), "node-lost")]
    assert (record.state, record.placement, record.reason.code) == (JobState.QUEUED, NOWHERE, "node-lost")


def test_a_node_is_set_aside_and_taken_back(state):
    assert node_changes.apply(state, NodeSetAside(5.0, "n1", "a broken fan")) == []
    assert state.trust.set_aside == {"n1": "a broken fan"}
    assert node_changes.apply(state, NodeTakenBack(6.0, "n1")) == []
    assert not state.trust.set_aside


def test_a_node_in_use_and_an_unknown_node_are_refused(state):
    with pytest.raises(Conflict, match="node 'n1' is in use"):
        node_changes.apply(state, NodeTakenBack(5.0, "n1"))
    for event in (NodeSetAside(5.0, "n7", "gone"), NodeTakenBack(5.0, "n7")):
        with pytest.raises(UnknownName, match="n7"):
            node_changes.apply(state, event)
