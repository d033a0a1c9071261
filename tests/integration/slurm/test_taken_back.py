"""A node that Slurm takes back under a job, in each of the ways there are, on machines and daemons of all speeds.

Knobs: how it is taken back, how long the grace is, how slow imports, the disk, a slurmd and Slurm's commands are. Each
case runs once; `POLLUX_FAULT_EVENTS` sets how often. The job has not saved anything before: what it goes on with was
saved within the grace.
"""

import os
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.slurm.service import Service, is_live
from tests.integration.slurm.training import EPOCHS, SAMPLES, begin, has_trained, trained_once

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "1"))
SLOWNESS = Path(__file__).parent / "slowness"


@dataclass(frozen=True)
class Machine:
    """How slow it is, in seconds more than it takes anyhow: `import torch`, each write to the disk, each `squeue`."""

    import_seconds: float = 0.0
    disk_seconds: float = 0.0
    squeue_seconds: float = 0.0


@dataclass(frozen=True)
class Taking:
    """`how` the node is taken back; for so long its slurmd does nothing at that moment; the partition's grace."""

    how: str = "preempt"
    slurmd_seconds: float = 0.0
    grace_seconds: int = 30


CASES = {
    "slow-imports": (Machine(import_seconds=3.0), Taking()),
    "slow-slurmd": (Machine(), Taking(slurmd_seconds=2.5)),
    "scancel": (Machine(), Taking("scancel")),
    "slow-disk": (Machine(disk_seconds=0.5), Taking()),
    "short-grace": (Machine(), Taking(grace_seconds=1)),
    "slow-squeue": (Machine(squeue_seconds=2.0), Taking("scancel")),
}
# On a machine as fast as it is, so that one service has them all; one has a slurmd that stands still.
QUICK = ("scancel", "short-grace", "slow-slurmd")


@pytest.fixture(scope="module")
def make_service(slurm, tmp_path_factory):
    """A service on a machine of that slowness: the one there is, or another in its place."""
    there: dict[Machine, Service] = {}

    def make(machine):
        if machine not in there:
            for other in [*there]:
                there.pop(other).end()
            folder = tmp_path_factory.mktemp("service")
            service = there[machine] = Service(
                folder / "home", slurm, slots=2, options={"poll_seconds": "0.2"},
                POLLUX_LEASE_SECONDS="20", POLLUX_LOST_SECONDS="25",
                **environ_of(machine, folder),
            )  # fmt: skip
            service.wait("three nodes", lambda: len(service.nodes()) == 3)
        return there[machine]

    yield make
    for service in there.values():
        service.end()


def environ_of(machine, folder):
    environ = {
        "PYTHONPATH": os.pathsep.join([str(SLOWNESS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "POLLUX_TEST_IMPORT_SECONDS": str(machine.import_seconds),
        "POLLUX_TEST_DISK_SECONDS": str(machine.disk_seconds),
    }
    if machine.squeue_seconds:
        commands = folder / "commands"
        commands.mkdir()
        (commands / "squeue").write_text(
            f'#!/bin/sh\nsleep {machine.squeue_seconds}\nexec {shutil.which("squeue")} "$@"\n'
        )
        (commands / "squeue").chmod(0o755)
        environ["PATH"] = f"{commands}:{os.environ['PATH']}"
    return environ


@pytest.mark.parametrize("number", range(EVENTS))
@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_what_a_job_has_is_saved_when_its_node_is_taken_back(make_service, case, number):
    machine, taking = CASES[case]
    service = make_service(machine)
    slurm = service.slurm
    slurm.run("scontrol", "update", "PartitionName=main", f"GraceTime={taking.grace_seconds}")
    name = f"taken-{len(service.jobs())}"
    begin(service, name)
    (node,) = service.until(name, "live job", is_live)["placement"]
    service.wait("passes", lambda: has_trained(service, name, 2))
    stop_for(slurm, node, taking.slurmd_seconds)
    if taking.how == "scancel":
        slurm.run("scancel", slurm.run("squeue", "-h", "-r", "-t", "RUNNING", "-w", node, "-o", "%i").strip())
    else:
        words = ("-p", "high", "-w", node, "--gres=gpu:4", "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 600")
        slurm.run("sbatch", *words)
    try:
        service.until(name, "move", lambda job: is_live(job) and job["placement"] and node not in job["placement"])
    finally:
        slurm.run("scancel", "-n", "urgent")
    service.ended_well(name, EPOCHS, SAMPLES)
    trained_once(service, name)
    service.wait("node again", lambda: len(service.nodes()) == 3)


def stop_for(slurm, node, seconds):
    """Have the node's slurmd do nothing for so long."""
    found = [pid for pid in slurm.processes(node) if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd"]
    if seconds:
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
