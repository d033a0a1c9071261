"""The suite that every backend passes, on a node that a real Slurm lends."""

import secrets
from pathlib import Path

import pytest

from pollux.backends.slurm.backend import SlurmBackend
from pollux.storage.state_file import write_state
from pollux.testing.conformance.backends import BackendConformance


class TestSlurm(BackendConformance):
    """All benches use the same pilots: hosts cost more to start than the tests."""

    pool: Path
    secret = secrets.token_hex(32)

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def pilots(cls, slurm, tmp_path_factory):
        cls.pool = tmp_path_factory.mktemp("pool")
        yield
        slurm.run("scancel", "--user=root")
        slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")

    @classmethod
    def backend(cls, home):
        (home / "run").mkdir(exist_ok=True)
        write_state(home / "run" / "fleet.secret", cls.secret.encode())
        return SlurmBackend(
            home, nodes="2", gpus_per_node=4, slots=4, cpus_per_node=8, partition="main", time_limit="30:00",
            poll_seconds=1.0, head="127.0.0.1", pool=cls.pool, warm=False,
        )  # fmt: skip
