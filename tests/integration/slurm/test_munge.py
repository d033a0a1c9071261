"""Without munge nobody is who he says: that is told with a remedy, work goes on, and all is well once it is back."""

import os
import signal

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live

EPOCHS = 200
REMEDY = "authentication is refused: is munge running here, with the cluster's key and a right clock?"


@pytest.fixture
def service(slurm, tmp_path):
    """It is started while there is no munged; commands that wait for one that died are ended after a few seconds."""
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": "25"}
    options = {"nodes": "1", "command_seconds": "4"}
    slurm.stop_munge()
    running = None
    try:
        running = Service(tmp_path / "home", slurm, slots=2, options=options, **seconds)
        yield running
    finally:
        slurm.stop_munge()
        slurm.start_munge()
        if running is not None:
            running.end()


def submit(service, name):
    (service.home / name / "curve").mkdir(parents=True)
    service.submit(name, [curve.__file__, service.home / name / "curve", EPOCHS, 1], 1)


def trained(service, name):
    """The passes that a job has noted."""
    noted = service.home / name / "curve" / "curve"
    return len(noted.read_text().splitlines()) if noted.exists() else 0


def ended_well(service, name):
    (service.home / name / "fast").touch()
    service.ended_well(name, EPOCHS, curve.SAMPLES)


def warned(service, *words):
    """A warning with these words and the remedy, in one line; the command line shows it."""

    def said(lines):
        return any(all(word in line for word in (*words, REMEDY)) for line in lines)

    service.wait(f"warning with {words}", lambda: said(service.call("/v1/status")["warnings"]))
    assert said(service.pollux("ls").splitlines())


def queue(slurm):
    return slurm.run("squeue", "-h", "-r", "-o", "%i %T %N")


def test_what_runs_goes_on_without_munge_and_what_waits_comes_with_it(service):
    slurm, missing = service.slurm, "Munge encode failed: Failed to access"
    # It started without, and says what is wrong with the words of the command that failed.
    assert all(words in service.said for words in ("warning: 'squeue' failed", missing, REMEDY)), service.said
    submit(service, "first")
    warned(service, "'squeue' failed with exit code 1", missing, "going on with the nodes there are")
    assert service.call("/v1/jobs/first")["job"]["state"] == "queued"
    slurm.start_munge()
    before = service.until("first", "live job", is_live)
    service.wait("peace", lambda: not service.call("/v1/status")["warnings"])
    pilots = queue(slurm)

    # One that died leaves its socket, at which commands wait for longer than we do.
    slurm.stop_munge(crash=True)
    warned(service, "'squeue' did not answer within 4 s", "nobody answers at munge's socket", str(slurm.folder))
    passes = trained(service, "first")
    service.wait("further passes", lambda: trained(service, "first") >= passes + 4)

    # Neither is the next service kept from its jobs, nor a new job from the node that is there.
    os.kill(service.pid, signal.SIGKILL)
    service.up()
    warned(service, "'squeue' did not answer within 4 s", "nobody answers at munge's socket")
    submit(service, "second")
    ended_well(service, "second")
    slurm.start_munge()
    service.wait("peace", lambda: not service.call("/v1/status")["warnings"])
    after = service.until("first", "live job", is_live)
    assert (after["generation"], after["placement"]) == (before["generation"], before["placement"])
    assert queue(slurm) == pilots
    ended_well(service, "first")
