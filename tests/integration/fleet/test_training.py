"""A training job on several nodes changes, loses nodes and outlives the service; its curve is that of one process."""

import signal
import subprocess
import sys
import textwrap

from tests.support.s3 import make_bucket, s3_server

from pollux.backends.protocol import NodeDown, NodeUp, ReplicasLost
from pollux.storage.object_store import ObjectStore
from pollux.testing.jobs import float64_job


def holds(verdict):
    """Every sample once, and the parameters of one process."""
    assert (verdict.samples_lost, verdict.samples_repeated, verdict.exact) == (0, 0, True), verdict
    assert verdict.largest_difference < 1e-9, verdict


def told(run, kind):
    return [event for event in run.events if isinstance(event, kind)]


def test_a_job_changes_over_nodes_and_loses_some(make_run, nodes):
    """It grows, shrinks and moves in living processes, goes on from memory or, with no replica left, from disk."""
    run = make_run(epochs=22)
    run.train_on({"n0": 1})
    (first,) = float64_job.living(run.folder)
    run.move_to({"n0": 1, "n1": 2})
    assert (len(run.replicas_on(0)), len(run.replicas_on(1))) == (1, 2)
    assert first in run.replicas_on(0)
    run.move_to({"n1": 1, "n2": 1})
    assert (len(run.replicas_on(0)), len(run.replicas_on(1)), len(run.replicas_on(2))) == (0, 1, 1)
    run.move_to({"n0": 1, "n2": 1})
    assert (len(run.replicas_on(0)), len(run.replicas_on(1)), len(run.replicas_on(2))) == (1, 0, 1)
    assert [kind for kind, _ in run.pauses] == ["grow", "shrink", "move"]

    run.move_to({"n0": 1, "n1": 2})
    kept = run.replicas_on(0)
    nodes.hosts.kill_node(1)
    run.wait_for("loss", lambda: run.losses)
    run.await_running()
    assert "n1" in run.losses[0]
    assert (run.replicas_on(0), run.restarts) == (kept, [])
    (lost,) = told(run, ReplicasLost)
    assert (lost.replicas, str(lost.remaining)) == ((1, 2), "n0:1")
    run.wait_for("end of the node", lambda: told(run, NodeDown))
    assert run.events.index(lost) < run.events.index(told(run, NodeDown)[0])
    assert nodes.hosts.add_node() == "n1"

    nodes.hosts.kill_node(0)
    run.wait_for("restart", lambda: run.restarts)
    assert run.restarts[0].startswith("lost: ")
    run.await_running()
    assert nodes.hosts.add_node() == "n0"
    run.wait_for("their return", lambda: len(run.backend.inventory()) == 3)

    def returned():
        ups = [event for event in told(run, NodeUp) if run.events.index(event) > run.events.index(lost)]
        return {event.node.id for event in ups} == {"n0", "n1"}

    # Told by another thread, a moment after they are there.
    run.wait_for("word of it", returned)
    holds(run.finish())


def test_a_job_whose_nodes_share_no_disk_goes_on_from_a_store(make_run, nodes, monkeypatch):
    """Whoever is the first replica writes there, through changes and losses; a start anew is from there alone."""
    with s3_server() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        make_bucket("fleet")
        store = ObjectStore("s3://fleet/run")
        run = make_run(epochs=22, env={**variables, "LIVE_JOB_STORE": store.address, "POLLUX_RUN_ID": "run"})
        run.train_on({"n0": 1})
        run.move_to({"n0": 1, "n1": 1})
        run.move_to({"n1": 1})
        saved = newest_step(store)
        run.wait_for("checkpoint of the one that is first now", lambda: newest_step(store) > saved)
        run.move_to({"n2": 1})
        assert [kind for kind, _ in run.pauses] == ["grow", "shrink", "move"]
        saved = newest_step(store)
        run.wait_for("checkpoint of those that came", lambda: newest_step(store) > saved)
        nodes.hosts.kill_node(2)
        run.wait_for("restart", lambda: run.restarts)
        run.await_running()
        assert nodes.hosts.add_node() == "n2"
        holds(run.finish())
        assert not (run.folder / "checkpoints").exists()


def newest_step(store):
    """The last step of which there is a whole checkpoint."""
    return max((name for name in store.sizes() if name.endswith("/pollux.json")), default="")


def test_a_silent_node_is_given_up_and_fenced(make_run, nodes):
    """The engine says nothing: the node's own host ends what it runs once it may not go on, and nobody trains twice."""
    run = make_run(watch=False)
    run.train_on({"n0": 1, "n1": 1})
    frozen, (lost,) = nodes.hosts.freeze_node(1), run.replicas_on(1)
    try:
        run.wait_for("loss", lambda: run.losses)
        assert "no answer" in run.losses[0]
        run.await_running()
        run.wait_for("the node's end", lambda: told(run, NodeDown))
        assert [node.id for node in run.backend.inventory()] == ["n0", "n2"]
        assert any("n1" in line for line in run.fleet.warnings())
    finally:
        nodes.hosts.thaw(frozen)
    run.wait_for("fence", lambda: lost not in float64_job.living(run.folder))
    run.wait_for("its return", lambda: len(run.backend.inventory()) == 3)
    run.wait_for("false alarm", lambda: run.fleet.false_alarms == 1)
    assert run.restarts == []
    holds(run.finish())


SERVICE = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from tests.support.fleet_run import FleetNodes, FleetRun
    run = FleetRun(FleetNodes(Path(sys.argv[1]), secret=sys.argv[2]), Path(sys.argv[3]))
    run.train_on({"n0": 1, "n1": 1})
    print("trains", flush=True)
    time.sleep(600)
    """
)


def test_a_killed_service_is_followed_by_one_that_finds_everything(make_run, nodes, tmp_path):
    nodes.await_all()
    words = [str(nodes.folder), nodes.secret, str(tmp_path / "job")]
    first = subprocess.Popen([sys.executable, "-c", SERVICE, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "trains\n"
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    before = float64_job.living(tmp_path / "job")
    run = make_run()
    run.generation, run.state = 1, "running"
    assert [(each.generation, each.state) for each in run.backend.running()] == [(1, "running")]
    run.move_to({"n0": 1, "n1": 1, "n2": 1})
    assert set(before) < set(float64_job.living(run.folder))
    assert run.restarts == []
    holds(run.finish())
