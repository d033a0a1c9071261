"""The workload of the local service on three Slurm nodes of four slots: jobs come and go, and train as if alone."""

import re
from pathlib import Path

import pytest
from tests.integration.ray import curve
from tests.integration.slurm.service import Service, is_live

# At the pace of the script, each but the guest takes longer than all that is done to it here.
EPOCHS = {"first": 120, "second": 120, "third": 120, "guest": 20}
SEEDS = {name: seed for seed, name in enumerate(EPOCHS, start=1)}


@pytest.fixture
def service(slurm, tmp_path):
    seconds = {"POLLUX_LEASE_SECONDS": "20", "POLLUX_LOST_SECONDS": "25"}
    running = Service(tmp_path / "home", slurm, slots=4, **seconds)
    try:
        running.wait("nodes", lambda: sorted(node["gpus"] for node in running.nodes().values()) == [4, 4, 4])
        yield running
    finally:
        running.end()


def folder(service, name):
    """Where a job notes its losses and processes; a file `fast` beside it has it hurry."""
    return service.home / ("quick" if name == "guest" else "slow") / name


def submit(service, name, gpus):
    folder(service, name).mkdir(parents=True)
    service.submit(name, [curve.__file__, folder(service, name), EPOCHS[name], SEEDS[name]], gpus)


def hurry(service, kind):
    (service.home / kind).mkdir(exist_ok=True)
    (service.home / kind / "fast").touch()


def all_live(service, *names):
    return {name: service.until(name, f"{name} running", is_live) for name in names}


def sized(service, name, gpus):
    """The job changed to so many replicas, live; its processes are as many."""
    service.resize(name, gpus)
    service.until(name, f"{gpus} replicas", lambda job: is_live(job) and sum(job["placement"].values()) == gpus)
    service.wait("processes", lambda: sum(map(len, replicas(service, name).values())) == gpus)


def replicas(service, name):
    """Living processes of a job by the Slurm node that they are on: replicas noted number and start in their folder."""
    noted = {tuple(path.name.split("-")[1:]) for path in folder(service, name).glob("replica-*")}
    found = {}
    for node in service.slurm.nodes:
        mine = {pid for pid in service.slurm.processes(node) if identity(pid) in noted}
        if mine:
            found[node] = mine
    return found


def identity(pid):
    """A process' number inside its node, and when it began; empty where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        inner = re.search(r"^NSpid:.*\s(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return ()
    return (inner.group(1), fields[19]) if inner and fields[0] not in "ZX" else ()


def agree(service):
    """Decisions, Slurm's books, and what runs on each node are the same; processes that go may take a moment."""

    def seen():
        service.check_books()
        jobs = {name: job["placement"] for name, job in service.jobs().items() if job["state"] == "running"}
        there = {name: {node: len(pids) for node, pids in replicas(service, name).items()} for name in jobs}
        return jobs == there

    service.wait("agreement", seen)


def test_jobs_come_and_go_and_all_of_them_train_as_if_alone(service, tmp_path):
    submit(service, "first", "1..8")
    submit(service, "second", "1..4")
    submit(service, "third", "1..4")
    all_live(service, "first", "second", "third")
    # There is room for all that follows, so that nobody has to move out of another's way.
    sized(service, "second", 2)
    sized(service, "third", 1)
    # Any two nodes of three have one in common: some processes stay.
    sized(service, "first", 5)
    before = replicas(service, "first")
    sized(service, "first", 6)
    after = replicas(service, "first")
    assert len(before) == len(after) == 2, "it is not over nodes"
    assert set().union(*before.values()) & set().union(*after.values()), "all processes are new"
    agree(service)

    processes = {name: replicas(service, name) for name in ("first", "second", "third")}
    service.kill_and_follow()
    assert {name: replicas(service, name) for name in processes} == processes
    agree(service)
    hurry(service, "quick")
    submit(service, "guest", "1..2")
    service.ended_well("guest", EPOCHS["guest"], curve.SAMPLES)

    sized(service, "first", 2)
    sized(service, "second", 4)
    agree(service)

    for name in ("second", "third"):
        service.resize(name, 1)
    hurry(service, "slow")
    for name in EPOCHS:
        service.ended_well(name, EPOCHS[name], curve.SAMPLES)
        losses = curve.found(folder(service, name))
        assert losses == pytest.approx(curve.expected(EPOCHS[name], SEEDS[name]), rel=1e-9)
    assert (5, 6) in live_changes(service, "first")


def live_changes(service, name):
    """From how many replicas to how many the job changed in living processes, as its receipt says."""
    resized = [
        event for event in service.receipt(name)["events"] if event["kind"] == "resized" and "without" in event["text"]
    ]
    return [(event["numbers"]["before"], event["numbers"]["after"]) for event in resized]
