"""The suite that every backend passes, on two hosts of a fleet."""

import os
import secrets
import signal
from pathlib import Path

import pytest
from tests.support.fleet import ProcessFleet

from pollux.backends.fleet.backend import FleetBackend
from pollux.backends.process.proc import start_time
from pollux.backends.process.records import read_record, run_folder
from pollux.storage.state_file import write_state
from pollux.testing.conformance.backends import BackendConformance


class TestFleet(BackendConformance):
    """All benches use the same two hosts, whose start costs more than the tests."""

    folder: Path
    secret = secrets.token_hex(32)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def hosts(cls, tmp_path_factory):
        cls.folder = tmp_path_factory.mktemp("hosts")
        yield
        ProcessFleet(cls.folder).kill_all()

    @classmethod
    def backend(cls, home):
        (home / "run").mkdir(exist_ok=True)
        write_state(home / "run" / "fleet.secret", cls.secret.encode())
        fleet = ProcessFleet(cls.folder, num_nodes=2, slots=3, cold=True)
        return FleetBackend(home, fleet, head="127.0.0.1", warm=False, lease_seconds=20.0, lost_seconds=25.0)

    def test_a_killed_shim_leaves_nothing_and_its_generation_is_lost(self, bench):
        """The hosts end what it had, since nobody renews the lease; only then its places are free."""
        bench.submit("orphaned", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
        bench.wait("output", lambda: bench.log("orphaned").endswith("\n"))
        shim = read_record(run_folder(bench.home, "orphaned") / "shim.json")
        os.kill(shim["pid"], signal.SIGKILL)
        assert bench.end("orphaned").outcome == "lost"
        assert start_time(int(bench.log("orphaned"))) is None
