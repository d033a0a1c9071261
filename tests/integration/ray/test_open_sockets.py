"""Every socket of ours of a job over Ray's nodes, as the kernel lists them, under a stranger's hands.

Ray's own processes listen, too: who reaches those may do what Ray lets them, which `docs/security.md` says.
"""

from pathlib import Path

import pytest
from tests.integration.ray.runs import SECRET, RayRun

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import wait_until

FAULTS = Path(__file__).parents[2] / "faults"
attacks = load_module(str(FAULTS / "store_attacks.py"))
sockets = load_module(str(FAULTS / "open_sockets.py"))


@pytest.fixture
def run(cluster, tmp_path):
    made = RayRun(cluster.address, tmp_path / "job", 60)
    yield made
    made.close()


def test_every_socket_of_a_job_over_nodes_stands_a_stranger(run):
    first, second, _ = run.names
    run.train_on({first: 1, second: 1})

    def seen():
        processes = sockets.ours(str(run.folder), SECRET)
        found = sockets.opened(processes)
        return (processes, found) if sockets.roles(found) >= {"replica tcp"} else None

    processes, found = wait_until("a group of the replicas", seen, pause_seconds=0.2)
    wanted = {"pollux-store tcp", "pollux-host tcp", "replica tcp", "shim.sock"}
    assert sockets.roles(found) == wanted, found
    before = sockets.sizes(processes, run.folder)
    reached = attacks.as_stranger(sockets.poke, sockets.places(found, run.folder), 20222)
    sockets.check_withstood(reached, wanted, before, run.folder)
    verdict = run.finish()
    assert (verdict.samples_lost, verdict.samples_repeated, verdict.exact) == (0, 0, True), verdict
