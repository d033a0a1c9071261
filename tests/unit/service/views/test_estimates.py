"""What people are told comes from the decision that was made, not from what is around the job now."""

from dataclasses import replace

import pytest

from pollux.controller.explanations.explain import explain_cost
from pollux.core import Node, Queue
from pollux.service.views.estimates import explained
from pollux.testing.servers.service import result_of
from pollux.wire.job import JobRequest, Resources


def told(world, name):
    """The record as the engine has it, and what the API shows."""
    entry = world.engine.views.board.get(name)
    return entry.record, entry.status(world.clock.time).reason


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"min_gpus": 9, "max_gpus": 9}, "suitable_gpus"),
        ({"resources": Resources(gpu_types=("h100",))}, "other_type:cpu"),
        ({"resources": Resources(cpus=64.0)}, "largest_node_cpus"),
        ({"resources": Resources(memory_bytes=900 * 2.0**40)}, "largest_node_memory_bytes"),
        ({"min_gpus": 3, "max_gpus": 3, "queue": "small"}, "queue_quota"),
    ],
)
@pytest.mark.parametrize("policy", ["pollux", "fifo"])
def test_altering_a_number_of_a_job_that_fits_nowhere_changes_what_is_shown(make_world, policy, fields, name):
    world = make_world(policy=policy)
    world.backend.node_up(Node("node-0", 4, "cpu", num_cpus=2.0, memory_bytes=2.0**34))
    world.engine.set_queue(Queue("small", 1.0, 2))
    world.after(5.0)
    _, plan = result_of(
        world.engine.submit(JobRequest("never", ("x",), workdir="/", **{"min_gpus": 1, "max_gpus": 1, **fields}))
    )
    world.after(5.0)
    record, shown = told(world, "never")
    assert shown.code == "fits-nowhere"
    assert shown.text == plan.text
    assert shown.text.startswith("cannot start here now: it needs ")
    numbers = {**record.reason.numbers, name: record.reason.numbers[name] * 2 + 1}
    altered = replace(record, reason=replace(record.reason, numbers=numbers))
    assert explained(altered).text != shown.text


def test_what_changed_since_does_not_change_what_was_decided(world):
    world.submit("big", min_gpus=9, max_gpus=9)
    before = told(world, "big")[1].text
    assert before == "cannot start here now: it needs 9 GPUs, and there are 4"
    world.engine.views.board.get("big").around = None
    assert told(world, "big")[1].text == before


def test_the_cost_of_a_change_is_told_as_of_now_and_apart_from_the_decision(world):
    world.submit("a", max_gpus=1)
    world.backend.started("a")
    world.after(1.0)
    before = told(world, "a")[1]
    record = world.engine.views.board.get("a").record
    record.note_pause("restart", 6.0)
    assert told(world, "a")[1] == before
    assert explain_cost(record) == "as of now, a change of its GPUs costs it about 6 s, with a restart"
