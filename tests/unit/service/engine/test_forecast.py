"""Plans of jobs, from what the engine knows."""

from pollux.core import Node, Queue
from pollux.testing.servers.service import result_of
from pollux.wire.job import JobRequest, Resources


def test_a_job_does_not_wait_behind_one_that_cannot_start(world):
    """Both are submitted right after a decision, so that there is none about either yet."""
    world.engine.set_queue(Queue("small", 1.0, 2))
    world.after(5.0)
    result_of(world.engine.submit(JobRequest("before", ("x",), 1, 1, workdir="/")))
    _, first = result_of(world.engine.submit(JobRequest("big", ("x",), 3, 3, queue="small", workdir="/")))
    _, second = result_of(world.engine.submit(JobRequest("mine", ("x",), 2, 2, workdir="/")))
    assert first.text == "cannot start here now: it needs 3 GPUs, and the quota of its queue is 2"
    assert (second.starts_now, second.gpus, second.behind) == (True, 2, ())


def test_a_job_that_needs_more_cpus_than_a_node_has_is_told_so(world):
    world.backend.node_up(Node("node-0", 4, "cpu", num_cpus=2.0, memory_bytes=2.0**34))
    world.after(5.0)
    _, plan = result_of(world.engine.submit(JobRequest("a", ("x",), 1, 1, workdir="/", resources=Resources(cpus=64.0))))
    assert plan.text == "cannot start here now: it needs 64 CPUs per GPU, and the largest node has 2"
    assert (plan.starts_now, plan.gpus, plan.low_gpus, plan.high_gpus) == (False, 0, 0, 0)
