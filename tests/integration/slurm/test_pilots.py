"""A pool that grows by pilots when jobs could use more, and gives them back, by Slurm's own books."""

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live

from pollux.backends.slurm.script import pool_name

EPOCHS = 120


@pytest.fixture
def service(slurm, tmp_path):
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": "25"}
    options = {"nodes": "1..3", "idle_seconds": "1"}
    running = Service(tmp_path / "home", slurm, slots=2, options=options, **seconds)
    try:
        yield running
    finally:
        running.end()


def submit(service, name, gpus):
    (service.home / name / "curve").mkdir(parents=True)
    # Neither makes room for the other while the pool still grows.
    service.submit(name, [curve.__file__, service.home / name / "curve", EPOCHS, gpus], gpus, preemptible=False)


def ended_well(service, name):
    (service.home / name / "fast").touch()
    return service.ended_well(name, EPOCHS, curve.SAMPLES)


def books(service):
    """State and node of every pilot of this service that Slurm knows of, those that ended too."""
    name = pool_name(service.home / "pool")
    text = service.slurm.run("squeue", "-h", "-r", "-t", "all", f"--name={name}", "-o", "%T %N")
    return sorted(line.split() for line in text.splitlines())


def test_the_pool_grows_and_shrinks_with_what_jobs_could_use(service):
    slurm = service.slurm
    submit(service, "small", 2)
    (home,) = service.until("small", "live job", is_live)["placement"]
    assert books(service) == [["RUNNING", home]], "more was asked for than the job can use"

    submit(service, "wide", 4)
    wide = service.until("wide", "live job", is_live)
    assert sorted(wide["placement"].values()) == [2, 2]
    assert set(service.pilots()) == {home, *wide["placement"]} == set(slurm.nodes)
    service.check_books()

    ended_well(service, "wide")
    slurm.wait_for(lambda: service.pilots().keys() == {home}, "release of what is not needed")
    small = service.until("small", "job that stays", is_live)
    assert (small["placement"], small["generation"], small["restarts"]) == ({home: 2}, 1, 0), "it had to make room"
    slurm.wait_for(lambda: [node for node, state in slurm.states().items() if state != "idle"] == [home], "idle nodes")
    # Nobody but the service ended the others, and none was asked for beside.
    others = sorted({*slurm.nodes} - {home})
    assert books(service) == [*(["CANCELLED", node] for node in others), ["RUNNING", home]]
    ended_well(service, "small")
    # The fewest stay.
    assert service.pilots().keys() == service.nodes().keys() == {home}
