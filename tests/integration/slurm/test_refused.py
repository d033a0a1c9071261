"""What a real Slurm refuses or keeps waiting is told in its own words, with a remedy; the service goes on."""

import pytest

from pollux.backends.slurm.backend import SlurmBackend
from pollux.testing.waiting import wait_until

TOO_MUCH = "no node has so much: check gpus_per_node=, cpus_per_node= (--slots), memory=, partition="


@pytest.fixture
def backend(slurm, tmp_path):
    made = []

    def new(**options):
        given = {"gpus_per_node": 4, "cpus_per_node": 8, "partition": "main", "time_limit": "30:00", **options}
        made.append(SlurmBackend(tmp_path, poll_seconds=0.5, head="127.0.0.1", pool=tmp_path / "pool", **given))
        made[0].start(lambda event: None)
        return made[0]

    yield new
    for each in made:
        each.close()
    slurm.run("scancel", "--user=root")
    slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")


@pytest.mark.parametrize(
    ("options", "said", "remedy"),
    [
        ({"partition": "nowhere"}, "invalid partition specified: nowhere", "check partition=: 'sinfo' lists them"),
        ({"gpus_per_node": 8}, "Requested node configuration is not available", TOO_MUCH),
        ({"memory": "900G"}, "Memory specification can not be satisfied", TOO_MUCH),
    ],
)
def test_what_cannot_be_had_is_told_and_asked_for_again(backend, options, said, remedy):
    asked = backend(**options)
    (warning,) = wait_until("warning", asked.warnings)
    assert warning.startswith("1 node cannot be asked for: 'sbatch' failed with exit code 1: ")
    assert said in warning
    assert remedy in warning
    assert asked.inventory() == ()


def test_a_pilot_that_is_not_granted_is_told_while_the_others_work(backend):
    asked = backend(nodes="4")
    wait_until("three nodes", lambda: len(asked.inventory()) == 3)
    wait_until("reason", lambda: asked.warnings() == ("1 node waits in Slurm's queue: Resources",))
