"""Slurm without pilots: a generation asks for its nodes with one batch job, and they are given back with it."""

import math

import pytest

from pollux.backends.fleet import node_watch
from pollux.backends.slurm.backend import SlurmBackend
from pollux.core import Placement
from pollux.testing.conformance.backends import Bench

WAITS = """
    import os, time
    from pathlib import Path
    me, generation = os.environ["POLLUX_JOB"], os.environ["POLLUX_GENERATION"]
    seen = os.environ["WORLD_SIZE"] + " " + os.environ["CUDA_VISIBLE_DEVICES"]
    Path(f"{me}.up-{generation}-{os.environ['RANK']}").write_text(seen + "\\n")
    while not Path(f"{me}.go-{generation}").exists():
        time.sleep(0.01)
"""


@pytest.fixture
def bench(slurm, tmp_path):
    def new(home):
        return SlurmBackend(
            home, mode="job", gpus_per_node=4, cpus_per_node=8, partition="main", time_limit="30:00",
            poll_seconds=0.5, head="127.0.0.1", warm=False, pool=tmp_path / "pool",
        )  # fmt: skip

    bench = Bench(tmp_path, new)
    bench.wait("nodes", lambda: len(bench.backend.inventory()) == 3)
    yield bench
    bench.backend.close()
    slurm.run("scancel", "--user=root")
    slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")


def queue(slurm):
    """Comment to nodes of everything that runs."""
    lines = slurm.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%k|%N").splitlines()
    return dict(line.split("|") for line in lines)


def start(bench, generation, **places):
    variables = {"POLLUX_JOB": "train", "POLLUX_GENERATION": str(generation)}
    launch = bench.launch("train", WAITS, generation, 1, env=variables)
    object.__setattr__(launch, "placement", Placement.of(places))
    bench.backend.submit(launch)
    # Each sees those of its job on its node, as with other launchers.
    devices = [",".join(map(str, range(count))) for count in places.values() for _ in range(count)]
    for rank, listed in enumerate(devices):
        assert bench.file(f"train.up-{generation}-{rank}") == f"{len(devices)} {listed}\n"


def test_each_generation_asks_for_its_nodes_and_gives_them_back(bench, slurm):
    assert queue(slurm) == {}
    start(bench, 1, node1=1, node2=2)
    assert queue(slurm) == {"train@node[1-2]": "node[1-2]"}
    bench.backend.stop("train", 1, 5.0)
    start(bench, 2, node2=1, node3=1)
    slurm.wait_for(lambda: "node3" in queue(slurm).values(), "second batch job")
    bench.restart()
    assert [each.state for each in bench.backend.running()] == ["running"]
    (bench.folder / "train.go-2").touch()
    assert bench.end("train", 2).outcome == "succeeded"
    bench.backend.forget("train")
    slurm.wait_for(lambda: not queue(slurm), "empty queue")
    bench.wait("nodes", lambda: len(bench.backend.inventory()) == 3)


def test_a_job_goes_on_when_the_service_starts_anew_while_slurm_does_not_answer(bench, slurm, monkeypatch):
    start(bench, 1, node1=1)
    monkeypatch.setattr(node_watch, "_RETURN_SECONDS", 0.5)
    slurm.stop_controller()
    try:
        bench.restart()
        bench.wait("no memory of nodes", lambda: not bench.backend._slots.remembered)
        # By then everybody has been told which nodes are gone.
        bench.wait("nodes", lambda: [node.id for node in bench.backend.inventory()] == ["node1"])
        assert [each.state for each in bench.backend.running()] == ["running"]
    finally:
        slurm.start_controller()
    (bench.folder / "train.go-1").touch()
    assert bench.end("train", 1).outcome == "succeeded"


def test_what_others_use_is_not_offered_and_not_waited_for_while_there_is_more(bench, slurm):
    slurm.run("sbatch", "-o", "/dev/null", "--nodelist=node1", "--gres=gpu:2", "--cpus-per-task=1", "--wrap=sleep 600")
    bench.wait("others", lambda: [node.id for node in bench.backend.inventory()] == ["node2", "node3"])
    lender = bench.backend._slurm
    object.__setattr__(lender.options, "wait_seconds", 1.0)
    lender.ask("late", {"node1": 1})
    bench.wait("refusal", lambda: lender.refusal("late").startswith("Slurm has not lent node1 for "))
    assert "has others to lend (node[2-3])" in lender.refusal("late")
    slurm.wait_for(lambda: "late@node1" not in slurm.run("squeue", "-h", "-t", "PENDING", "-o", "%k"), "cancelled job")


def offered_again(bench, node):
    """It was given back, and can be asked for."""
    lender = bench.backend._slurm
    bench.wait("its rest", lambda: lender.queue.clock() > lender._offers._resting.get(node, math.inf))
    bench.wait("node offered", lambda: node in [each.id for each in bench.backend.inventory()])


@pytest.mark.parametrize("dies", [False, True])
def test_a_node_is_given_back_while_the_rest_of_its_batch_job_is_used(bench, slurm, dies):
    """Else Slurm keeps it for as long, and where it has died nobody would start a host there again."""
    start(bench, 1, node1=1)
    (bench.folder / "train.up-1-0").unlink()
    lender = bench.backend._slurm
    # Places of a wider job, whose batch job brought both, and which has left one.
    lender.ask("wide", {"node2": 1, "node3": 1})
    bench.wait("places", lambda: len(lender.held("wide")) == 2)
    assert queue(slurm)["wide@node[2-3]"] == "node[2-3]"
    variables = {"POLLUX_JOB": "stays", "POLLUX_GENERATION": "1"}
    launch = bench.launch("stays", WAITS, 1, 1, env=variables)
    object.__setattr__(launch, "placement", Placement.of({"node2": 1}))
    bench.backend.submit(launch)
    assert bench.file("stays.up-1-0").startswith("1 ")
    if dies:
        slurm.kill_node("node3")
    try:
        lender.drop("wide", {"node3": lender.held("wide")["node3"]})
        slurm.wait_for(lambda: queue(slurm)["wide@node[2-3]"] == "node2", "batch job without it")
    finally:
        if dies:
            slurm.start_node("node3")
    slurm.wait_for(lambda: slurm.states()["node3"] == "idle", "node that Slurm has back")
    offered_again(bench, "node3")
    lender.drop("wide", lender.held("wide"))
    # What runs beside it has not noticed.
    (bench.folder / "stays.go-1").touch()
    assert bench.end("stays").outcome == "succeeded"
    (bench.folder / "train.go-1").touch()
    assert bench.end("train").outcome == "succeeded"
    for job in ("stays", "train"):
        bench.backend.forget(job)
    start(bench, 2, node3=1)
    (bench.folder / "train.go-2").touch()
    assert bench.end("train", 2).outcome == "succeeded"
