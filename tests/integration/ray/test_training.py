"""A training job on several Ray nodes changes and loses nodes; Ray's books say the same."""

import collections
import os
import time

import pytest
from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import RayRun

from pollux.backends.protocol import NodeDown, NodeUp, ReplicasLost
from pollux.testing import live_job

# Long enough for all that happens here at its slow pace, and soon over when it may be fast.
EPOCHS = 120
# One in the ordinary run; a tenth of `--events` in the long one, five to a job: it must still train when the node for
# the next one is up, and its ledger keeps 1,000 passes.
KILLS = max(1, int(os.environ.get("POLLUX_FAULT_EVENTS", "0")) // 10)
KILLS_OF_ONE = min(KILLS, 5)


def holds(verdict):
    """Every sample once, and the parameters of one process."""
    assert (verdict.samples_lost, verdict.samples_repeated, verdict.exact) == (0, 0, True), verdict
    assert verdict.largest_difference < 1e-9, verdict


@pytest.fixture
def run(cluster, tmp_path):
    made = RayRun(cluster.address, tmp_path / "job", EPOCHS)
    yield made
    made.close()


def booked(cluster, run):
    """GPUs by node that Ray's placement groups hold for the run."""
    ids = {cluster.ray_id(name): name for name in run.names}
    groups = cluster.groups(service=f"pollux:{run.service}:")
    return dict(collections.Counter(ids[node] for node in groups.values() if node in ids))


def agree(cluster, run, **counts):
    """Ray's books hold what was decided, no more and no less; what was given back is so a moment later."""
    wait(f"{counts} in Ray's books, which have {booked(cluster, run)}", lambda: booked(cluster, run) == counts, 60)
    assert len(live_job.living(run.folder)) == sum(counts.values())


def test_a_job_grows_shrinks_and_moves_and_ray_knows(cluster, run):
    a, b, c = run.names
    run.begin(**{a: 1})
    agree(cluster, run, **{a: 1})
    run.go(**{a: 1, b: 2})
    agree(cluster, run, **{a: 1, b: 2})
    run.go(**{b: 1, c: 1})
    agree(cluster, run, **{b: 1, c: 1})
    holds(run.finish())
    assert run.restarts == []
    assert [kind for kind, _ in run.pauses][:2] == ["grow", "shrink"]
    wait("empty books", lambda: not cluster.groups(service="pollux:training:"))


def kill_one(cluster, run, stays, goes):
    """Kill a node under a job that has one replica elsewhere and two there; seconds until the rest trains again."""
    losses, known = len(run.losses), {*run.names, *(event.node.id for event in run.of_nodes(NodeUp))}
    kept = set(live_job.living(run.folder))
    began = time.monotonic()
    cluster("kill", node=cluster.ray_id(goes))
    run.until("loss", lambda: len(run.losses) > losses)
    run.settled()
    seconds = time.monotonic() - began
    lost = [event for event in run.told if isinstance(event, ReplicasLost)][-1]
    assert (lost.replicas, str(lost.remaining)) == ((1, 2), f"{stays}:1")
    run.until("end of the node", lambda: [event for event in run.of_nodes(NodeDown) if event.node_id == goes])
    assert set(live_job.living(run.folder)) < kept
    cluster("add")
    run.until("new node", lambda: {event.node.id for event in run.of_nodes(NodeUp)} - known)
    return seconds


@pytest.mark.parametrize("turn", range(KILLS // KILLS_OF_ONE))
def test_nodes_are_killed_and_the_rest_goes_on_from_memory(cluster, tmp_path, turn):
    run = RayRun(cluster.address, tmp_path / "job", EPOCHS if KILLS == 1 else 950)
    try:
        stays, goes, _ = run.names
        run.begin(**{stays: 1, goes: 2})
        for number in range(KILLS_OF_ONE):
            if number:
                goes = next(name for name in run.names if name != stays)
                run.go(**{stays: 1, goes: 2})
            print(f"run {turn + 1}, kill {number + 1}: trains again after {kill_one(cluster, run, stays, goes):.2f} s")
        holds(run.finish())
        assert run.restarts == []
    finally:
        run.close()


def test_a_frozen_node_is_given_up_fenced_and_used_again(cluster, tmp_path):
    """Ray itself takes a minute to see it; whoever thaws must not train beside those that went on."""
    run = RayRun(cluster.address, tmp_path / "job", EPOCHS, lease_seconds=4.0, lost_seconds=6.0)
    try:
        stays, goes, _ = run.names
        run.begin(**{stays: 1, goes: 1})
        node = cluster.ray_id(goes)
        cluster("stop", node=node)
        try:
            run.until("loss", lambda: run.losses)
            run.settled()
            assert "no answer" in run.losses[0]
            run.until("end of the node", lambda: [event for event in run.of_nodes(NodeDown) if event.node_id == goes])
        finally:
            cluster("go on", node=node)
        run.until("fence", lambda: len(live_job.living(run.folder)) == 1)
        run.until("its return", lambda: goes in run.names)
        holds(run.finish())
        assert run.restarts == []
    finally:
        run.close()
