"""Nodes with GPUs of two types: Slurm's names for them are known, and a job is on one type at a time."""

import os
import signal

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live

from pollux.backends.slurm.backend import SlurmBackend
from pollux.core import Placement
from pollux.testing.conformance.backends import Bench

TYPES = {"node1": "a100", "node2": "a100", "node3": "v100"}
EPOCHS = 120


@pytest.fixture
def service(slurm_of_two_types, tmp_path):
    """GPUs, and no slots; that the driver has not heard of them is in the logs of pilots."""
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": "25"}
    options = {"gpus_per_node": "2"}
    running = Service(tmp_path / "home", slurm_of_two_types, slots=0, options=options, **seconds)
    try:
        running.wait("three nodes", lambda: len(running.nodes()) == 3)
        yield running
    finally:
        running.end()


def submit(service, name, gpus, **more):
    (service.home / name / "curve").mkdir(parents=True)
    service.submit(name, [curve.__file__, service.home / name / "curve", EPOCHS, 1], gpus, **more)


def types_of(service):
    return {name: node["gpu_type"] for name, node in service.nodes().items()}


def facts(service):
    return [line["fact"] for line in service.history() if "fact" in line]


def placements(service, job_id):
    """Everywhere that a job was placed, decision by decision."""
    made = [fact["decision"]["allocation"] for fact in facts(service) if fact["type"] == "decision-made"]
    return [{node for node, _ in allocation[job_id]} for allocation in made if job_id in allocation]


def starts_anew_without_slurm(service):
    """The next service has nobody to ask for the types of nodes: they are what they were, and jobs where they were."""
    before = service.jobs()
    os.kill(service.pid, signal.SIGKILL)
    service.slurm.stop_controller()
    try:
        service.up()
        service.wait("a look in vain", lambda: service.call("/v1/status")["warnings"])
        assert types_of(service) == TYPES
    finally:
        service.slurm.start_controller()
    service.wait("peace", lambda: not service.call("/v1/status")["warnings"])
    for name, job in before.items():
        now = service.until(name, "job after the kill", is_live)
        assert (now["generation"], now["placement"]) == (job["generation"], job["placement"])


def test_a_job_is_on_one_type_at_a_time(service):
    assert types_of(service) == TYPES
    submit(service, "named", 1, resources={"gpu_type": "V100"})
    # Six are there, and no more than four of one type: the third is on a node of the same.
    submit(service, "wide", "3..6")
    for name in ("named", "wide"):
        service.until(name, "live job", is_live)
    assert service.jobs()["named"]["placement"] == {"node3": 1}
    service.resize("wide", "4..6")
    wide = service.until("wide", "all of one type", lambda job: is_live(job) and job["gpus"] == 4)
    assert wide["placement"] == {"node1": 2, "node2": 2}
    starts_anew_without_slurm(service)
    types = [{TYPES[node] for node in nodes} for nodes in placements(service, "wide")]
    assert types
    assert all(len(each) == 1 for each in types), types
    added = {(fact["node"]["id"], fact["node"]["gpu_type"]) for fact in facts(service) if fact["type"] == "node-added"}
    assert added == set(TYPES.items()), "a node was of another type for a while"
    for name in ("named", "wide"):
        (service.home / name / "fast").touch()
        service.ended_well(name, EPOCHS, curve.SAMPLES)


def test_without_pilots_a_node_is_of_its_type_before_and_after_it_is_lent(slurm_of_two_types, tmp_path):
    def new(home):
        return SlurmBackend(
            home, mode="job", gpus_per_node=2, cpus_per_node=8, partition="main", time_limit="30:00",
            poll_seconds=0.5, head="127.0.0.1", warm=False, pool=tmp_path / "pool",
        )  # fmt: skip

    bench = Bench(tmp_path, new)
    try:
        bench.wait("nodes", lambda: len(bench.backend.inventory()) == 3)
        assert {node.id: node.gpu_type for node in bench.backend.inventory()} == TYPES
        launch = bench.launch(
            "one", "import pathlib, time; pathlib.Path('up').write_text('yes\\n'); time.sleep(600)", 1, 1
        )
        object.__setattr__(launch, "placement", Placement.of({"node3": 2}))
        bench.backend.submit(launch)
        bench.file("up")
        assert slurm_of_two_types.run("squeue", "-h", "-t", "RUNNING", "-o", "%N").split() == ["node3"]
        assert {node.id: node.gpu_type for node in bench.backend.inventory()} == TYPES
        bench.backend.stop("one", 1, 0.0)
        bench.end("one")
        bench.backend.forget("one")
    finally:
        bench.backend.close()
        slurm_of_two_types.run("scancel", "--user=root")
        slurm_of_two_types.wait_for(lambda: not slurm_of_two_types.run("squeue", "-h"), "empty queue")
