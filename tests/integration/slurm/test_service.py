"""A real service on a real Slurm cluster: training over nodes that die, are drained, limited, and outlive the service.

Where `POLLUX_RECORD` names a folder, what the deaths of nodes cost is written there.
"""

import datetime
import json
import math
import os
import time
from pathlib import Path

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live
from tests.integration.slurm.training import EPOCHS, SAMPLES, begin, has_trained, trained_once

from pollux.backends.slurm.parse import read_seconds

KILLS = int(os.environ.get("POLLUX_FAULT_EVENTS", "3"))
LOST_SECONDS = 25


@pytest.fixture(scope="module")
def service(slurm, tmp_path_factory):
    home = tmp_path_factory.mktemp("service") / "home"
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": str(LOST_SECONDS)}
    running = Service(home, slurm, slots=2, **seconds)
    try:
        running.wait("three nodes", lambda: len(running.nodes()) == 3)
        yield running
    finally:
        running.end()


def test_a_drained_node_is_left_with_the_work_saved(service):
    name = f"moved-{len(service.jobs())}"
    begin(service, name, 4)
    (node,) = service.until(name, "live job", is_live)["placement"]
    service.slurm.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=fan")
    service.until(name, "move", lambda job: is_live(job) and job["placement"].keys() - {node} == set(job["placement"]))
    assert node not in service.nodes()
    service.slurm.wait_for(lambda: service.slurm.states()[node] == "drained", "drained node")
    service.slurm.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    service.ended_well(name, 4, SAMPLES)
    service.wait("node again", lambda: len(service.nodes()) == 3)


def test_a_preempted_pilots_job_goes_on_elsewhere_with_nothing_repeated(service):
    """It has not saved anything before: what it goes on with was saved within the grace."""
    name = f"preempted-{len(service.jobs())}"
    begin(service, name)
    (node,) = service.until(name, "live job", is_live)["placement"]
    service.wait("passes", lambda: has_trained(service, name, 2))
    words = ("-p", "high", "-w", node, "--gres=gpu:4", "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 600")
    service.slurm.run("sbatch", *words)
    try:
        service.until(name, "move", lambda job: is_live(job) and job["placement"] and node not in job["placement"])
        service.slurm.wait_for(
            lambda: service.slurm.run("squeue", "-h", "-n", "urgent", "-t", "RUNNING"), "job of higher priority"
        )
    finally:
        service.slurm.run("scancel", "-n", "urgent")
    service.ended_well(name, EPOCHS, SAMPLES)
    trained_once(service, name)
    service.wait("node again", lambda: len(service.nodes()) == 3)


def test_a_pilot_near_its_time_limit_is_left_and_given_back_before_it(service):
    name = f"limited-{len(service.jobs())}"
    begin(service, name)
    (node,) = service.until(name, "live job", is_live)["placement"]
    service.wait("passes", lambda: has_trained(service, name, 2))
    queue = ("squeue", "-h", "-r", "-t", "RUNNING", "-w", node, "-o", "%i %M")
    pilot, ran = service.slurm.run(*queue).split()
    # In whole minutes: the first that leaves it one, in which it has to save.
    limit = math.ceil((read_seconds(ran) + 60.0) / 60.0)
    service.slurm.run("scontrol", "update", f"JobId={pilot}", f"TimeLimit={limit}")
    service.until(name, "move", lambda job: is_live(job) and job["placement"] and node not in job["placement"])
    going = {"RUNNING", "COMPLETING"}
    service.slurm.wait_for(lambda: going.isdisjoint(state_of(service.slurm, pilot)), "end of the pilot")
    _, state, left = state_of(service.slurm, pilot)
    assert (state, read_seconds(left) > 0.0) == ("CANCELLED", True), "Slurm ended it, and not we"
    service.ended_well(name, EPOCHS, SAMPLES)
    trained_once(service, name)
    service.wait("node again", lambda: len(service.nodes()) == 3)


def state_of(slurm, pilot):
    """Id, state, and what was left of its time."""
    lines = slurm.run("squeue", "-h", "-r", "-t", "all", "-o", "%i %T %L").splitlines()
    (found,) = [line.split() for line in lines if line.startswith(f"{pilot} ")]
    return found


def test_a_job_over_nodes_outlives_the_service_and_nodes(service):
    # Each further kill waits until the job is on two nodes again: so long it takes its time, however many they are.
    epochs = 60 + 40 * KILLS
    # One that is tried again finds the first one's job.
    name = f"wide-{len(service.jobs())}"
    folder = service.home / name / "curve"
    folder.mkdir(parents=True)
    service.submit(name, [curve.__file__, folder, epochs, KILLS], 4)
    job = service.until(name, "live job", is_live)
    assert sorted(job["placement"].values()) == [2, 2]
    service.check_books()
    service.kill_and_follow()
    service.resize(name, "2..4")
    seconds = [kill_a_node(service, name, again=number + 1 < KILLS) for number in range(KILLS)]
    print(f"a node died under its job {KILLS} times; it ran on after {', '.join(f'{each:.1f}' for each in seconds)} s")
    (folder.parent / "fast").touch()
    service.ended_well(name, epochs, curve.SAMPLES)
    assert curve.found(folder) == pytest.approx(curve.expected(epochs, KILLS), rel=1e-9)
    if "POLLUX_RECORD" in os.environ:
        record(Path(os.environ["POLLUX_RECORD"]), seconds, service.receipt(name))


def record(folder, seconds, receipt):
    """Write down what the deaths of nodes cost a job that ended well."""
    counts = [entry["samples"] for entry in receipt["ledger"]]
    told = {
        "engine": "slurm", "kills": len(seconds), "seconds_to_resume": [round(each, 2) for each in seconds],
        "lost_seconds": LOST_SECONDS,
        "samples_lost": sum(max(0, curve.SAMPLES - count) for count in counts),
        "samples_repeated": sum(max(0, count - curve.SAMPLES) for count in counts),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node_kills_slurm.json").write_text(json.dumps(told, indent=2) + "\n")


def kill_a_node(service, name, again):
    """Seconds from the end of a node under a job until that runs without it; `again`: it is to lose another."""
    job = service.until(name, "live job", is_live)
    while len(job["placement"]) == 1:
        job = spread(service, name)
    node = list(job["placement"])[-1]
    began = time.monotonic()
    service.slurm.kill_node(node)
    service.until(name, "loss", lambda job: is_live(job) and job["placement"] and node not in job["placement"])
    seconds = time.monotonic() - began
    state = service.slurm.states()[node].rstrip("*")
    assert state in ("allocated", "mixed", "idle"), f"Slurm has it as {state}: it may not have been our heartbeat"
    service.wait("node gone", lambda: node not in service.nodes())
    service.slurm.start_node(node)
    if again:
        # The third takes the place of the one that died, which comes back meanwhile.
        service.wait("two nodes", lambda: len(service.nodes()) >= 2)
        spread(service, name)
    return seconds


def spread(service, name):
    """The job over nodes, and free to go on with fewer: the policy may find that these are faster on this machine."""
    service.resize(name, 4)
    service.until(name, "four replicas", lambda job: is_live(job) and job["gpus"] == 4)
    service.resize(name, "2..4")
    return service.until(name, "live job", is_live)
