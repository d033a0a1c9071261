"""A training job on several Ray nodes changes and loses nodes; Ray's books say the same."""

import collections
import datetime
import json
import os
import time
from pathlib import Path

import pytest
from tests.integration.ray.conftest import wait
from tests.integration.ray.runs import RayRun

from pollux.backends.protocol import NodeDown, NodeUp, ReplicasLost
from pollux.testing.jobs import float64_job
from pollux.testing.jobs.random_changes import Verdict

# Long enough for all that happens here at its slow pace, and soon over when it may be fast.
EPOCHS, MANY_EPOCHS = 120, 400
# Three in the ordinary run; a tenth of `--events` in the long one, five to a job: it must still train when the node for
# the next one is up, and its ledger keeps 1,000 passes.
KILLS = max(3, int(os.environ.get("POLLUX_FAULT_EVENTS", "0")) // 10)
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
    wait(
        f"{counts} in Ray's books, which have {booked(cluster, run)}",
        lambda: booked(cluster, run) == counts,
    )
    assert len(float64_job.living(run.folder)) == sum(counts.values())


def test_a_job_grows_shrinks_and_moves_and_ray_knows(cluster, run):
    a, b, c = run.names
    run.train_on({a: 1})
    agree(cluster, run, **{a: 1})
    run.move_to({a: 1, b: 2})
    agree(cluster, run, **{a: 1, b: 2})
    run.move_to({b: 1, c: 1})
    agree(cluster, run, **{b: 1, c: 1})
    holds(run.finish())
    assert run.restarts == []
    assert [kind for kind, _ in run.pauses][:2] == ["grow", "shrink"]
    wait("empty books", lambda: not cluster.groups(service="pollux:training:"))


def kill_one(cluster, run, stays, goes):
    """Kill a node under a job that has one replica elsewhere and two there; seconds until the rest trains again."""
    losses, known = len(run.losses), {*run.names, *(event.node.id for event in run.of_nodes(NodeUp))}
    kept = set(float64_job.living(run.folder))
    node = cluster.ray_id(goes)
    began = time.monotonic()
    cluster("kill", node=node)
    run.wait_for("loss", lambda: len(run.losses) > losses)
    run.await_running()
    seconds = time.monotonic() - began
    assert cluster.is_alive(node), "Ray has seen it by now: this shows nothing of what sees it sooner"
    lost = [event for event in run.events if isinstance(event, ReplicasLost)][-1]
    assert (lost.replicas, str(lost.remaining)) == ((1, 2), f"{stays}:1")
    run.wait_for("end of the node", lambda: [event for event in run.of_nodes(NodeDown) if event.node_id == goes])
    assert cluster.is_alive(node)
    assert set(float64_job.living(run.folder)) < kept
    cluster("add")
    run.wait_for("new node", lambda: {event.node.id for event in run.of_nodes(NodeUp)} - known)
    return seconds


@pytest.fixture(scope="module")
def measured():
    """Seconds and verdict by turn, of those that came to their end; written where `POLLUX_RECORD` names a folder."""
    turns: dict[int, tuple[list[float], Verdict]] = {}
    yield turns
    if turns and os.environ.get("POLLUX_RECORD"):
        seconds = [one for of_turn, _ in turns.values() for one in of_turn]
        figures = {
            "engine": "ray",
            "kills": len(seconds),
            "seconds_to_resume": [round(one, 3) for one in seconds],
            "samples_lost": sum(verdict.samples_lost for _, verdict in turns.values()),
            "samples_repeated": sum(verdict.samples_repeated for _, verdict in turns.values()),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        folder = Path(os.environ["POLLUX_RECORD"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "node_kills_ray.json").write_text(json.dumps(figures) + "\n")


@pytest.mark.parametrize("turn", range(KILLS // KILLS_OF_ONE))
def test_nodes_are_killed_and_the_rest_goes_on_from_memory(cluster, tmp_path, measured, turn):
    run = RayRun(cluster.address, tmp_path / "job", MANY_EPOCHS if KILLS == 3 else 950)
    try:
        stays, goes, _ = run.names
        run.train_on({stays: 1, goes: 2})
        seconds = []
        for number in range(KILLS_OF_ONE):
            if number:
                goes = next(name for name in run.names if name != stays)
                run.move_to({stays: 1, goes: 2})
            seconds.append(kill_one(cluster, run, stays, goes))
            print(f"run {turn + 1}, kill {number + 1}: trains again after {seconds[-1]:.2f} s")
        measured[turn] = seconds, run.finish()
        holds(measured[turn][1])
        assert run.restarts == []
    finally:
        run.close()


def end_actor(cluster, run, how, stays, goes):
    """End the actor of a node under a job that has one replica elsewhere and two there, until the node has another."""
    node, losses, kept = cluster.ray_id(goes), len(run.losses), set(float64_job.living(run.folder))
    ups = [event.node.id for event in run.of_nodes(NodeUp)].count(goes)
    cluster(how, node=node, service=run.service)
    run.wait_for("loss", lambda: len(run.losses) > losses)
    run.await_running()
    assert "no answer" not in run.losses[-1], "its end was heard of, and not its silence"
    lost = [event for event in run.events if isinstance(event, ReplicasLost)][-1]
    assert (lost.replicas, str(lost.remaining)) == ((1, 2), f"{stays}:1")
    run.wait_for("end of the actor", lambda: [event.node_id for event in run.of_nodes(NodeDown)].count(goes) == ups)
    run.wait_for("new actor", lambda: [event.node.id for event in run.of_nodes(NodeUp)].count(goes) > ups)
    assert not run.backend.warnings()
    assert len(set(float64_job.living(run.folder)) & kept) == 1, "who was left has gone on"
    run.move_to({stays: 1, goes: 2})
    agree(cluster, run, **{stays: 1, goes: 2})
    assert cluster.is_alive(node), "Ray never has a node again that it gave up: it was there all the time"


def test_an_actor_is_killed_and_the_rest_goes_on_while_its_node_gets_another(cluster, tmp_path):
    """Its process by SIGKILL, then the next one by `ray.kill`."""
    run = RayRun(cluster.address, tmp_path / "job", MANY_EPOCHS, lease_seconds=60.0, lost_seconds=90.0)
    try:
        stays, goes, _ = run.names
        run.train_on({stays: 1, goes: 2})
        for how in ("kill host", "end host"):
            end_actor(cluster, run, how, stays, goes)
        holds(run.finish())
        assert run.restarts == []
    finally:
        run.close()


def test_a_frozen_node_is_given_up_fenced_and_used_again(cluster, tmp_path):
    """Ray itself takes a minute to see it; whoever thaws must not train beside those that went on."""
    run = RayRun(cluster.address, tmp_path / "job", EPOCHS, lease_seconds=20.0, lost_seconds=25.0)
    try:
        stays, goes, _ = run.names
        run.train_on({stays: 1, goes: 1})
        node = cluster.ray_id(goes)
        cluster("stop", node=node)
        try:
            run.wait_for("loss", lambda: run.losses)
            run.await_running()
            assert "no answer" in run.losses[0]
            run.wait_for(
                "end of the node", lambda: [event for event in run.of_nodes(NodeDown) if event.node_id == goes]
            )
            assert cluster.is_alive(node)
        finally:
            cluster("go on", node=node)
        run.wait_for("fence", lambda: len(float64_job.living(run.folder)) == 1)
        run.wait_for("its return", lambda: goes in run.names)
        holds(run.finish())
        assert run.restarts == []
    finally:
        run.close()
