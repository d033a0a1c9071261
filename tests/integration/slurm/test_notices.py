"""What Slurm says before and while it takes something away: limits, preemption, silence, and answers that are none."""

import math
import os
import textwrap

import pytest

from pollux.backends.protocol import NodeDown, NodeUp
from pollux.backends.slurm.backend import SlurmBackend
from pollux.backends.slurm.parse import read_seconds
from pollux.testing.conformance.backends import Bench

SAVES = """
    import os, signal, sys, time
    from pathlib import Path
    me = os.environ["POLLUX_JOB"]
    def told(number, frame):
        Path(f"{me}.saved").write_text("yes\\n")
        sys.exit(143)
    signal.signal(signal.SIGTERM, told)
    Path(f"{me}.up").write_text("yes\\n")
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """A folder before Slurm's commands in PATH: what is put there is run instead."""
    folder = tmp_path_factory.mktemp("commands")
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}:{before}"
    yield folder
    os.environ["PATH"] = before


@pytest.fixture(scope="module")
def bench(slurm, commands, tmp_path_factory):
    def new(home):
        return SlurmBackend(
            home, nodes="1", gpus_per_node=4, slots=2, cpus_per_node=8, time_limit="30:00", poll_seconds=0.5,
            command_seconds=15.0, margin_seconds=100.0, ahead_seconds=5.0, head="127.0.0.1", warm=False,
            pool=home / "pool",
        )  # fmt: skip

    bench = Bench(tmp_path_factory.mktemp("bench"), new)
    bench.wait("node", bench.backend.inventory)
    yield bench
    for each in bench.backend.running():
        bench.backend.stop(each.job_id, each.generation, 0.0)
        bench.backend.forget(each.job_id)
    bench.wait("empty backend", lambda: not bench.backend.running())
    bench.backend.close()
    slurm.run("scancel", "--user=root")
    slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "empty queue")


def play(commands, name, text):
    path = commands / f".{name}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    path.rename(commands / name)


def warned(bench, words):
    bench.wait(words, lambda: any(words in warning for warning in bench.backend.warnings()))


def works(bench, job):
    """A small job runs to its end on the one node."""
    bench.submit(job, "print('ran')")
    end = bench.end(job)
    assert (end.outcome, end.detail) == ("succeeded", "")
    bench.backend.forget(job)


def pilot_of(slurm):
    (line,) = slurm.run("squeue", "-h", "-r", "-p", "main", "-t", "RUNNING", "-o", "%i %N").splitlines()
    return line.split()


def told(bench, kind, after):
    nodes = [event for event in bench.told[after:] if isinstance(event, kind)]
    return [event.node.id if isinstance(event, NodeUp) else event.node_id for event in nodes]


def test_commands_that_hang_or_say_nonsense_cost_no_node(bench, commands):
    (node,) = bench.backend.inventory()
    play(commands, "squeue", "echo 'Welcome to the cluster!'; echo '1_0|RUNNING|'")
    warned(bench, "cannot be understood")
    works(bench, "despite-nonsense")
    bench.backend._slurm.queue.commands._seconds = 1.0
    play(commands, "squeue", "sleep 600")
    warned(bench, "'squeue' did not answer within 1 s")
    works(bench, "despite-silence")
    assert bench.backend.inventory() == (node,)
    bench.backend._slurm.queue.commands._seconds = 15.0
    (commands / "squeue").unlink()
    bench.wait("peace", lambda: not bench.backend.warnings())
    assert bench.backend.inventory() == (node,)


def test_without_its_controller_slurm_lends_on(bench, slurm):
    (node,), before = bench.backend.inventory(), pilot_of(slurm)
    slurm.stop_controller()
    works(bench, "without-controller")
    warned(bench, "going on with the nodes there are")
    slurm.start_controller()
    bench.wait("peace", lambda: not bench.backend.warnings())
    assert (bench.backend.inventory(), pilot_of(slurm)) == ((node,), before)


def runs(bench, slurm, job):
    """A job that saves its work when it is told to end; its pilot and node."""
    bench.submit(job, textwrap.dedent(SAVES), env={"POLLUX_JOB": job})
    bench.file(f"{job}.up")
    return pilot_of(slurm)


def comes_again(bench, slurm, before, after):
    """Another pilot is there, and its node works."""
    bench.wait("another pilot", lambda: told(bench, NodeUp, after))
    bench.wait("node", bench.backend.inventory)
    assert pilot_of(slurm)[0] != before
    works(bench, f"after-{before.replace('_', '-')}")


def test_a_pilot_is_left_before_its_time_limit(bench, slurm):
    pilot, node = runs(bench, slurm, "limited")
    after = len(bench.told)
    # In whole minutes: the first that leaves it almost one, however long the tests before took.
    ran = read_seconds(slurm.run("squeue", "-h", "-j", pilot, "-o", "%M").strip())
    slurm.run("scontrol", "update", f"JobId={pilot}", f"TimeLimit={math.ceil((ran + 45.0) / 60.0)}")
    bench.wait("notice", lambda: told(bench, NodeDown, after))
    assert told(bench, NodeDown, after) == [node]
    assert node not in [each.id for each in bench.backend.inventory()]
    assert bench.ends("limited") == []
    # As the service does with jobs of a node that goes.
    bench.backend.stop("limited", 1, 30.0)
    assert bench.end("limited").outcome == "stopped"
    assert bench.file("limited.saved") == "yes\n"
    bench.backend.forget("limited")
    comes_again(bench, slurm, pilot, after)


def test_a_preempted_pilot_is_no_crash_of_its_jobs(bench, slurm):
    pilot, node = runs(bench, slurm, "preempted")
    bench.submit("plain", "import pathlib, time; pathlib.Path('plain.up').write_text('yes\\n'); time.sleep(600)")
    bench.file("plain.up")
    after = len(bench.told)
    slurm.run(
        "sbatch", "-p", "high", "-w", node, "--gres=gpu:4", "-J", "urgent", "-o", "/dev/null", "--wrap", "sleep 600"
    )
    try:
        for job in ("preempted", "plain"):
            end = bench.end(job)
            assert (end.outcome, end.detail) == ("lost", f"node '{node}' is taken back by its engine")
        assert bench.file("preempted.saved") == "yes\n"
        bench.wait("notice", lambda: node in told(bench, NodeDown, after))
        for job in ("preempted", "plain"):
            bench.backend.forget(job)
        slurm.wait_for(lambda: slurm.run("squeue", "-h", "-n", "urgent", "-t", "RUNNING"), "job of higher priority")
        comes_again(bench, slurm, pilot, after)
    finally:
        slurm.run("scancel", "-n", "urgent")
