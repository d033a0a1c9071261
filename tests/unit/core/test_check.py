"""Each rule: a case that breaks it and, beside it, one that just does not."""

import pytest

from pollux.core import Cluster, Decision, JobLimits, JobView, Node, Placement, Queue, Snapshot, check
from pollux.testing import cluster, job, place, snapshot


def broken(seen: Snapshot, **wanted: str) -> list[tuple[str, str]]:
    decision = Decision({job_id: place(text) for job_id, text in wanted.items()})
    return [(violation.rule, violation.subject) for violation in check(seen, decision)]


def one(view: JobView, running: str = "", nodes: Cluster | None = None, queues: tuple[Queue, ...] = ()) -> Snapshot:
    return snapshot(nodes or cluster(4, 4), [view], {view.id: running} if running else {}, queues=queues)


def test_an_empty_decision_about_waiting_jobs_is_legal():
    assert broken(snapshot(jobs=[job("a"), job("b")])) == []


def test_unknown_job():
    assert broken(one(job("a")), x="n0:1") == [("known-job", "x")]


def test_unknown_node():
    assert broken(one(job("a")), a="n7:1") == [("known-node", "a")]


def test_minimum():
    seen = one(job("a", min_gpus=2))
    assert broken(seen, a="n0:1") == [("min-gpus", "a")]
    assert broken(seen, a="n0:1 n1:1") == []


def test_maximum():
    seen = one(job("a", max_gpus=2))
    assert broken(seen, a="n0:3") == [("max-gpus", "a")]
    assert broken(seen, a="n0:2") == []


def test_nodes_spanned():
    seen = one(job("a", max_nodes=1))
    assert broken(seen, a="n0:1 n1:1") == [("max-nodes", "a")]
    assert broken(seen, a="n1:4") == []


def test_gpu_type_wanted():
    nodes = Cluster.of([Node("n0", 4, "t4"), Node("n1", 4, "a100")])
    seen = one(job("a", gpu_types=("a100", "h100")), nodes=nodes)
    assert broken(seen, a="n0:1") == [("gpu-type", "a")]
    assert broken(seen, a="n1:1") == []


def test_one_gpu_type_at_a_time():
    nodes = Cluster.of([Node("n0", 4, "t4"), Node("n1", 4, "a100")])
    assert broken(one(job("a"), nodes=nodes), a="n0:1 n1:1") == [("one-gpu-type", "a")]
    assert broken(one(job("a", mixed_types=True), nodes=nodes), a="n0:1 n1:1") == []


def test_gpus_of_a_node():
    seen = snapshot(cluster(4), [job("a"), job("b")])
    assert broken(seen, a="n0:3", b="n0:2") == [("gpus", "n0")]
    assert broken(seen, a="n0:3", b="n0:1") == []


def test_cpus_of_a_node():
    seen = snapshot(cluster(4, num_cpus=10), [job("a", cpus_per_gpu=3), job("b", cpus_per_gpu=1)])
    assert broken(seen, a="n0:3", b="n0:1") == []
    assert broken(seen, a="n0:2", b="n0:2") == []
    seen = snapshot(cluster(4, num_cpus=9.9), [job("a", cpus_per_gpu=3), job("b", cpus_per_gpu=1)])
    assert broken(seen, a="n0:3", b="n0:1") == [("cpus", "n0")]


def test_memory_of_a_node():
    seen = one(job("a", memory_bytes_per_gpu=30e9), nodes=cluster(4, memory_bytes=100e9))
    assert broken(seen, a="n0:4") == [("memory", "n0")]
    assert broken(seen, a="n0:3") == []


def test_rounding_is_not_an_overload():
    views = [job(f"j{i}", cpus_per_gpu=0.1, memory_bytes_per_gpu=1e11 / 3) for i in range(3)]
    seen = snapshot(cluster(3, num_cpus=0.3, memory_bytes=1e11), views)
    assert 0.1 + 0.1 + 0.1 > 0.3
    assert broken(seen, j0="n0:1", j1="n0:1", j2="n0:1") == []


def test_a_closed_node_keeps_what_it_has_and_takes_nothing_new():
    nodes = Cluster.of([Node("n0", 4, schedulable=False), Node("n1", 4)])
    seen = one(job("a"), "n0:2", nodes)
    assert broken(seen, a="n0:2") == []
    assert broken(seen, a="n0:1 n1:1") == []
    assert broken(seen, a="n0:3") == [("schedulable", "a")]
    assert broken(one(job("a"), nodes=nodes), a="n0:1") == [("schedulable", "a")]


def test_a_quota_counts_the_whole_queue():
    views = [job("a", queue="q"), job("b", queue="q"), job("c")]
    seen = snapshot(cluster(4, 4), views, queues=[Queue("q", gpu_quota=3)])
    assert broken(seen, a="n0:2", b="n0:2", c="n1:4") == [("quota", "q")]
    assert broken(seen, a="n0:2", b="n0:1", c="n1:4") == []


def test_a_queue_that_nobody_described_has_no_quota():
    assert broken(one(job("a", queue="q")), a="n0:4") == []


def test_a_pinned_job_may_not_move_resize_or_stop():
    seen = one(job("a", pinned=True), "n0:2 n1:1")
    for elsewhere in ("n1:3", "n0:2", "n1:1 n0:2", ""):
        assert broken(seen, a=elsewhere) == [("pinned", "a")]
    assert broken(seen, a="n0:2 n1:1") == []


def test_a_pinned_job_that_waits_may_go_anywhere():
    assert broken(one(job("a", pinned=True)), a="n1:3") == []


def test_a_job_that_is_not_preemptible_may_be_resized_but_not_stopped():
    seen = one(job("a", preemptible=False), "n0:2")
    assert broken(seen) == [("preemptible", "a")]
    assert broken(seen, a="n1:1") == []
    assert broken(one(job("a", preemptible=False))) == []


IMMOVABLE = pytest.mark.parametrize("kind", [{"pinned": True}, {"preemptible": False}], ids=str)


@IMMOVABLE
@pytest.mark.parametrize(
    "limits", [{"min_gpus": 4}, {"max_gpus": 1}, {"max_nodes": 1}, {"gpu_types": ("h100",)}], ids=str
)
def test_limits_that_changed_do_not_bind_a_job_that_nobody_may_stop(kind, limits):
    seen = one(job("a", **kind, **limits), "n0:1 n1:1")
    assert broken(seen, a="n0:1 n1:1") == []
    assert broken(one(job("a", **limits), "n0:1 n1:1"), a="n0:1 n1:1") != []


def test_a_resized_job_must_keep_to_its_limits_even_if_it_may_not_be_stopped():
    seen = one(job("a", preemptible=False, max_gpus=1), "n0:4")
    assert broken(seen, a="n0:3") == [("max-gpus", "a")]
    assert broken(seen, a="n0:1") == []


@IMMOVABLE
def test_a_node_that_shrank_below_what_is_immovable_takes_nobody_else(kind):
    views = [job("a", cpus_per_gpu=2, memory_bytes_per_gpu=2, **kind), job("b")]
    nodes = Cluster.of([Node("n0", 1, num_cpus=2, memory_bytes=2), Node("n1", 4)])
    seen = snapshot(nodes, views, {"a": "n0:2", "b": "n0:1"})
    assert broken(seen, a="n0:2", b="n1:1") == []
    assert broken(seen, a="n0:2", b="n0:1") == [("gpus", "n0")]


def test_a_job_that_may_be_stopped_must_leave_a_node_that_shrank():
    assert broken(one(job("a"), "n0:2", cluster(1)), a="n0:2") == [("gpus", "n0")]


@IMMOVABLE
def test_a_quota_below_what_is_immovable_leaves_nothing_for_others(kind):
    views = [job("a", queue="q", **kind), job("b", queue="q")]
    seen = snapshot(cluster(4, 4), views, {"a": "n0:2"}, queues=[Queue("q", gpu_quota=1)])
    assert broken(seen, a="n0:2") == []
    assert broken(seen, a="n0:2", b="n1:1") == [("quota", "q")]


def test_a_job_that_may_not_be_stopped_may_shrink_towards_its_quota():
    view = job("a", queue="q", preemptible=False, min_gpus=3)
    seen = snapshot(cluster(4, 4), [view], {"a": "n0:4"}, queues=[Queue("q", gpu_quota=1)])
    assert broken(seen, a="n0:3") == []
    assert broken(seen, a="n0:4 n1:1") == [("quota", "q")]


def test_all_violations_are_told_with_their_numbers():
    seen = snapshot(cluster(4, 4), [job("a", min_gpus=2), job("b", max_gpus=4)], {"b": "n0:1"})
    decision = Decision({"a": place("n0:1"), "b": place("n0:4 n1:1"), "x": place("n1:1")})
    assert [str(violation) for violation in check(seen, decision)] == [
        "job 'x' is not in the snapshot",
        "job 'a' got 1 GPUs, below its minimum 2",
        "job 'b' got 5 GPUs, above its maximum 4",
        "node 'n0' has 4 GPUs and was given 5",
    ]


def test_two_jobs_may_share_gpus_where_both_allow_it():
    cluster = Cluster.uniform(1, 2)
    sharing = JobLimits(shares_gpus=True)
    jobs = (JobView("a", 0.0, sharing), JobView("b", 0.0, sharing), JobView("c", 0.0))
    halves = Placement((("node-0", 2),), shared=True)

    def rules(**allocation):
        return [violation.rule for violation in check(Snapshot(1, 0.0, cluster, jobs), Decision(allocation))]

    assert rules(a=halves, b=halves) == []
    assert rules(a=halves, c=halves) == ["shared"]
    # One whole GPU for another job leaves one GPU for two halves, of two jobs.
    one = Placement((("node-0", 1),), shared=True)
    assert rules(a=one, b=one, c=Placement((("node-0", 1),))) == []
    assert rules(a=halves, b=one, c=Placement((("node-0", 1),))) == ["gpus"]
    assert str(one) == "node-0:1/2"
    assert one != Placement((("node-0", 1),))


def test_three_halves_need_two_gpus():
    cluster = Cluster.uniform(1, 1)
    jobs = tuple(JobView(name, 0.0, JobLimits(shares_gpus=True)) for name in "abc")
    half = Placement((("node-0", 1),), shared=True)
    two, three = Decision({"a": half, "b": half}), Decision({"a": half, "b": half, "c": half})
    assert check(Snapshot(1, 0.0, cluster, jobs), two) == ()
    assert [violation.rule for violation in check(Snapshot(1, 0.0, cluster, jobs), three)] == ["gpus"]
