"""What a job would get."""

from dataclasses import replace

import pytest

from pollux.controller import JobCancelled, JobReported, JobSpec, spec_from
from pollux.controller.explanations.explain import explain_plan
from pollux.controller.explanations.forecast import plan_from
from pollux.core import Cluster, Decision, JobLimits, Queue, Reason, UnknownName
from pollux.core.errors import Conflict
from pollux.policies import create
from pollux.testing import cluster, goodput_model, place
from pollux.wire.job import JobRequest


def new(job_id="new", **fields):
    limits = {name: fields.pop(name) for name in list(fields) if name in JobLimits.__dataclass_fields__}
    return JobSpec(job_id, JobLimits(**limits), **fields)


def plan_for(controller, policy, spec, now):
    """The policy asked on a snapshot with the new job in it."""
    record = controller.draft(spec, now)
    snapshot = controller.snapshot(now, record)
    decision = policy.allocate(snapshot) if record.is_ready else Decision({})
    return plan_from(record, snapshot, decision, controller.jobs)


def test_a_job_that_starts_at_once(desk):
    plan = plan_for(desk.controller, create("pollux"), new(min_gpus=2, max_gpus=6), 10.0)
    assert (plan.job_id, plan.starts_now, plan.gpus, plan.low_gpus, plan.high_gpus) == ("new", True, 2, 2, 6)
    assert (plan.behind, plan.reason.code, plan.eta) == ((), "started", None)
    assert explain_plan(plan) == "starts now on 2 GPUs; expected to hold 2 to 6 GPUs while it runs"


def test_asking_changes_nothing(desk):
    desk.submit(0, "a", max_gpus=4)
    before = (desk.controller.state(), desk.controller.snapshot(5))
    plan_for(desk.controller, create("pollux"), new(), 10.0)
    assert (desk.controller.state(), desk.controller.snapshot(5)) == before


@pytest.mark.parametrize("policy", ["fifo", "las", "pollux", "pollux-genetic"])
def test_a_job_that_waits_says_behind_whom(desk, policy):
    desk.submit(0, "big", min_gpus=8, max_gpus=8, requested_gpus=8, preemptible=False)
    desk.decide(10, big="n0:4 n1:4")
    plan = plan_for(desk.controller, create(policy), new(max_gpus=1), 20.0)
    assert (plan.starts_now, plan.gpus, plan.low_gpus, plan.high_gpus) == (False, 0, 1, 1)
    assert plan.behind == ("big",)
    assert explain_plan(plan) == "waits behind big; expected to hold 1 GPU once it runs"


def test_a_job_that_can_never_run_is_told(make_desk):
    nodes = [replace(node, num_cpus=2.0, memory_bytes=2.0**34) for node in cluster(4, 4).nodes]
    desk = make_desk(Cluster.of(nodes), queues=(Queue("small", gpu_quota=2),))
    said = []
    for spec in (
        new(min_gpus=9), new(min_gpus=3, queue="small"), new(gpu_types=("h100",)), new(cpus_per_gpu=64.0),
        new(memory_bytes_per_gpu=900 * 2.0**40),
    ):  # fmt: skip
        plan = plan_for(desk.controller, create("pollux"), spec, 0.0)
        assert (plan.gpus, plan.low_gpus, plan.high_gpus) == (0, 0, 0)
        said.append(explain_plan(plan))
    assert said == [
        "cannot start here now: it needs 9 GPUs, and there are 8",
        "cannot start here now: it needs 3 GPUs, and the quota of its queue is 2",
        "cannot start here now: it needs 1 GPU of type h100, and there are none",
        "cannot start here now: it needs 64 CPUs per GPU, and the largest node has 2",
        "cannot start here now: it needs 900 TiB of memory per GPU, and the largest node has 16 GiB",
    ]


def test_a_job_that_cannot_start_stands_in_nobody_s_way(make_desk):
    """Jobs that no decision was about yet: one beyond its queue's quota, one beyond the nodes, one that could run."""
    desk = make_desk(queues=(Queue("small", gpu_quota=2),))
    desk.submit(0, "big", min_gpus=3, max_gpus=3, queue="small")
    desk.submit(0, "thirsty", min_gpus=9, max_gpus=9)
    desk.submit(0, "later", min_gpus=2, max_gpus=2)
    record, snapshot = desk.controller.jobs["later"], desk.controller.snapshot(1)
    decision = Decision({"later": place("n0:2")})
    plan = plan_from(record, snapshot, decision, desk.controller.jobs, ("big", "thirsty"))
    assert (plan.gpus, plan.behind) == (2, ())
    assert explain_plan(plan) == "starts now on 2 GPUs; expected to hold 2 GPUs while it runs"
    desk.submit(2, "other", min_gpus=2, max_gpus=2)
    plan = plan_from(record, desk.controller.snapshot(3), decision, desk.controller.jobs, ("big", "other"))
    assert (plan.gpus, plan.behind) == (0, ("other",))


def test_who_waits_for_another_queue_s_quota_stands_in_nobody_s_way(make_desk):
    desk = make_desk(queues=(Queue("small", gpu_quota=2),))
    for job_id, queue in (("first", "small"), ("second", "small"), ("mine", ""), ("theirs", "small")):
        desk.submit(0, job_id, min_gpus=2, max_gpus=2, queue=queue)
    desk.decide(1, first="n0:2")
    waits = {"second": Reason("waits-for-quota", {"gpus": 2.0, "quota_left": 0.0})}
    for job_id, behind in (("mine", ()), ("theirs", ("second",))):
        decision = Decision({"first": place("n0:2"), job_id: place("n1:2")}, reasons=waits)
        record, snapshot = desk.controller.jobs[job_id], desk.controller.snapshot(2)
        assert plan_from(record, snapshot, decision, desk.controller.jobs, ("second",)).behind == behind


def test_a_job_that_follows_others_is_behind_them(desk):
    desk.submit(0, "a")
    plan = plan_for(desk.controller, create("pollux"), new(after=("a",)), 10.0)
    assert (plan.gpus, plan.behind, plan.reason.code) == (0, ("a",), "waits-for-job")
    desk(JobCancelled(20, "a"))
    plan = plan_for(desk.controller, create("pollux"), new(after=("a",)), 30.0)
    assert (plan.behind, plan.reason.code) == (("a",), "dependency-failed")


def test_what_would_be_refused_is_refused(desk):
    desk.submit(0, "a")
    with pytest.raises(Conflict, match="job 'a' is known already"):
        plan_for(desk.controller, create("pollux"), new("a"), 10.0)
    with pytest.raises(UnknownName):
        plan_for(desk.controller, create("pollux"), new(after=("b",)), 10.0)


def test_a_job_that_has_just_been_submitted_has_a_plan_as_well(desk):
    desk.submit(0, "a", max_gpus=4)
    desk(JobReported(1, "a", goodput_model(), 1e6))
    snapshot = desk.controller.snapshot(2)
    plan = plan_from(desk.controller.jobs["a"], snapshot, create("pollux").allocate(snapshot))
    assert plan.gpus == 1
    assert plan.eta.low < plan.eta.current <= plan.eta.high
    assert not desk.controller.jobs["a"].placement


def test_a_request_can_be_planned(desk):
    spec = spec_from(JobRequest("a", ("true",), 4, 4), "a")
    assert plan_for(desk.controller, create("fifo"), spec, 0.0).gpus == 4
