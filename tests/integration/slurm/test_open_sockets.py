"""Every socket of a job over Slurm's nodes, as the kernel lists them, under a stranger's hands."""

from pathlib import Path

import pytest
from tests.integration.slurm.service import Service, is_live
from tests.integration.slurm.training import SAMPLES, begin

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import wait_until

# They check munge's credentials.
OF_SLURM = ("srun", "slurmstepd")
FAULTS = Path(__file__).parents[2] / "faults"
attacks = load_module(str(FAULTS / "store_attacks.py"))
sockets = load_module(str(FAULTS / "open_sockets.py"))


@pytest.fixture
def service(slurm, tmp_path):
    running = Service(tmp_path / "home", slurm, slots=1)
    try:
        running.wait("three nodes", lambda: len(running.nodes()) == 3)
        yield running
    finally:
        running.end()


def test_every_socket_of_a_job_over_nodes_stands_a_stranger(service):
    begin(service, "digits", 20, 2)
    service.until("digits", "live job", is_live)

    def seen():
        processes = sockets.ours(str(service.home))
        found = [each for each in sockets.opened(processes) if each.name not in OF_SLURM]
        return (processes, found) if sockets.roles(found, service.pid) >= {"replica tcp"} else None

    processes, found = wait_until("a group of the replicas", seen, pause_seconds=0.2, story=service.state)
    wanted = {"service tcp", "pollux-store tcp", "pollux-host tcp", "replica tcp", "shim.sock"}
    assert sockets.roles(found, service.pid) == wanted, found
    before = sockets.sizes(processes, service.home)
    reached = attacks.as_stranger(sockets.poke, sockets.places(found, service.home, service.pid), 20221)
    sockets.check_withstood(reached, wanted, before, service.home)
    service.ended_well("digits", 20, SAMPLES)
    assert "the job's store refused" in (service.home / "service.log").read_text()
    pilots = [path.read_text(errors="replace") for path in (service.home / "pool" / "pilots").glob("*.log")]
    assert any("the node's host refused" in text for text in pilots), pilots
