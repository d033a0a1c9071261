"""The suite that every backend passes, without pilots: a real Slurm is asked for the nodes of each generation."""

import pytest

from pollux.backends.slurm.backend import SlurmBackend
from pollux.testing.conformance.backends import BackendConformance


class TestSlurmWithoutPilots(BackendConformance):
    """Each bench has a pool of its own: batch jobs that none of its jobs uses are given back by whoever finds them."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls, slurm):
        yield
        slurm.run("scancel", "--user=root")
        slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")

    @classmethod
    def backend(cls, home):
        return SlurmBackend(
            home, mode="job", gpus_per_node=4, slots=4, cpus_per_node=8, partition="main", time_limit="30:00",
            poll_seconds=0.5, head="127.0.0.1", pool=home.parent / "pool", warm=False,
        )  # fmt: skip
