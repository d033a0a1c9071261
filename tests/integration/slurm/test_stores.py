"""Checkpoints in a store, on nodes that share no copies of them: a job whose only node dies goes on elsewhere.

Without pilots, so that this is a service's whole work there, too.
"""

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live
from tests.support.s3 import make_bucket, s3_server

from pollux.storage.object_store import ObjectStore

EPOCHS = 60


@pytest.fixture
def copies(slurm, tmp_path):
    """The folder of copies, of which every node has one of its own."""
    folder = tmp_path / "copies"
    folder.mkdir()
    restart(slurm, [folder])
    yield folder
    restart(slurm, [])


def restart(slurm, hide):
    for node in slurm.nodes:
        slurm.kill_node(node)
        slurm.start_node(node, hide)
    slurm.wait_for(lambda: set(slurm.states().values()) == {"idle"}, "nodes that start again")


@pytest.fixture
def variables(monkeypatch, copies):
    with s3_server() as found:
        found["XDG_CACHE_HOME"] = str(copies)
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        make_bucket("runs")
        yield found


@pytest.fixture
def service(slurm, variables, tmp_path):
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": "25"}
    options = {"mode": "job", "nodes": "1"}
    running = Service(tmp_path / "home", slurm, slots=2, options=options, **seconds)
    try:
        running.wait("three nodes", lambda: len(running.nodes()) == 3)
        yield running
    finally:
        running.end()


def test_a_job_whose_only_node_dies_goes_on_from_the_store(service, slurm, variables, copies, tmp_path):
    store = ObjectStore("s3://runs/one", tmp_path / "look")
    (service.home / "one" / "curve").mkdir(parents=True)
    run = [curve.__file__, service.home / "one" / "curve", EPOCHS, 1]
    service.submit("one", run, 2, env=variables, checkpoint={"dir": store.address, "every": "1s"})
    (node,) = service.until("one", "live job", is_live)["placement"]
    service.wait("checkpoint", lambda: any(name.endswith("/pollux.json") for name in store.sizes()))
    slurm.kill_node(node)
    try:
        service.until(
            "one", "other node", lambda job: is_live(job) and job["placement"] and node not in job["placement"]
        )
    finally:
        slurm.start_node(node, [copies])
    (service.home / "one" / "fast").touch()
    assert service.ended_well("one", EPOCHS, curve.SAMPLES)["restarts"] == 1
    resumed = [event["step"] for event in service.receipt("one")["events"] if event["kind"] == "resumed"]
    assert len(resumed) == 1
    assert resumed[0] > 0
    assert curve.found(service.home / "one" / "curve") == pytest.approx(curve.expected(EPOCHS, 1), rel=1e-9)
    assert not [*copies.iterdir()], "the copies were shared: this shows nothing"
    assert not (service.home / "checkpoints" / "one").exists()
