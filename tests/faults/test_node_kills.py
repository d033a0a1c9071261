"""Nodes of a training job are killed, frozen or lose their host at random moments; others come in their place.

`POLLUX_FAULT_EVENTS` sets the number of events, `POLLUX_FAULT_SEED` the seed. The parameters at the end are those of
one process, and the ledger says that no sample was lost or taken twice.
"""

import os
import random
import signal
import time

import pytest
from tests.support.fleet_run import FleetNodes, FleetRun

EVENTS = int(os.environ.get("POLLUX_FAULT_EVENTS", "1"))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20216"))
# Of one job: after some ten thousand steps even the order of a sum is seen in what it has learnt.
MOST_EVENTS = 20
WAYS = ("kill", "kill", "kill", "host", "freeze", "while it changes")


@pytest.fixture
def nodes(tmp_path):
    made = FleetNodes(tmp_path / "hosts")
    made.start()
    yield made
    made.hosts.kill_all()


def hurt(run, nodes, chance, number, way):
    """One event; returns what must be done so that the node is whole again."""
    if way == "freeze":
        frozen = nodes.hosts.freeze_node(number)
        return lambda: nodes.hosts.thaw(frozen)
    if way == "while it changes":
        run.request_move(run.random_placement(chance))
        time.sleep(chance.uniform(0.0, 0.3))
    if way == "host":
        os.kill(nodes.hosts.pid(number), signal.SIGKILL)
    else:
        nodes.hosts.kill_node(number)
    return lambda: nodes.hosts.add_node()


def one_job(nodes, folder, chance, events):
    """A job from its start to its end, and what becomes of its nodes meanwhile; how long it took to go on each time."""
    run = FleetRun(nodes, folder, epochs=10 + 13 * events)
    resumed = []
    try:
        run.train_on({"n0": 1, "n1": 1})
        for event in range(events):
            run.wait_for("two nodes", lambda: len(run.backend.inventory()) >= 2)
            if event:
                run.move_to(run.random_placement(chance))
            # One that was just started anew has not come to say where it is.
            run.wait_for("replicas", lambda: any(map(run.replicas_on, range(3))) or run.state == "done")
            busy = [number for number in range(3) if run.replicas_on(number)]
            if run.state == "done":
                break
            answered, began = len(run.losses) + len(run.restarts), time.monotonic()
            way = WAYS[event % len(WAYS)]
            number = chance.choice(busy)
            mend = hurt(run, nodes, chance, number, way)

            def is_answered(answered=answered, node=f"n{number}", way=way):
                if len(run.losses) + len(run.restarts) > answered:
                    return True
                # A change that was through before may have left the node: nothing of the job was lost with it.
                gone = node not in {each.id for each in run.backend.inventory()}
                return way == "while it changes" and gone and run.state == "running" and not run.placement.on(node)

            run.wait_for(f"answer to {way}", is_answered)
            run.await_running()
            resumed.append((way, round(time.monotonic() - began, 2)))
            mend()
        verdict = run.finish()
    finally:
        run.close()
    print("seconds until it went on:", resumed, "restarts:", run.restarts, "pauses:", run.pauses)
    assert (verdict.samples_lost, verdict.samples_repeated, verdict.exact) == (0, 0, True), verdict
    assert verdict.largest_difference < 1e-9, verdict
    return resumed


def test_no_sample_is_lost_with_the_nodes_of_a_job(nodes, tmp_path):
    print(f"seed {SEED}, {EVENTS} events")
    chance = random.Random(SEED)
    left, number = EVENTS, 0
    while left > 0:
        number += 1
        resumed = one_job(nodes, tmp_path / str(number), chance, min(left, MOST_EVENTS))
        assert resumed, "the job was through before anything happened to it"
        left -= len(resumed)
