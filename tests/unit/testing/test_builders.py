import pytest

from pollux.core import Decision, JobLimits, Queue
from pollux.testing import FakeOracle, SaturatingGoodput, after, cluster, goodput_model, job, place, snapshot


def test_fields_of_a_job_and_of_its_limits_are_told_apart():
    view = job("a", 5.0, requested_gpus=2, min_gpus=2, pinned=True)
    assert (view.submitted_at, view.requested_gpus) == (5.0, 2)
    assert view.limits == JobLimits(min_gpus=2, pinned=True)


def test_a_field_that_nobody_has_is_a_mistake():
    with pytest.raises(TypeError):
        job("a", maximum=4)


def test_clusters_and_snapshots_have_defaults():
    assert [node.num_gpus for node in cluster().nodes] == [4, 4]
    assert [(node.id, node.gpu_type) for node in cluster(1, 2, gpu_type="t4").nodes] == [("n0", "t4"), ("n1", "t4")]
    seen = snapshot(jobs=[job("a")], running={"a": "n0:1 n1:2"}, queues=[Queue("q")])
    assert seen.placement("a") == place("n0:1 n1:2")
    assert seen.queues == {"q": Queue("q")}


def test_goodput_saturates_at_its_knee():
    linear, bent = SaturatingGoodput(rate=10.0), SaturatingGoodput(rate=10.0, knee=4.0, across_nodes=0.5)
    assert [linear.goodput(1, k) for k in (1, 2, 8)] == [10.0, 20.0, 80.0]
    assert [bent.goodput(1, k) for k in (1, 5)] == [10.0, 25.0]
    assert bent.goodput(2, 5) == 12.5
    assert SaturatingGoodput(speed={"a100": 3.0}).goodput(1, 1, "a100") == 300.0
    assert linear.goodput(0, 0) == linear.goodput(2, 1) == 0.0


def test_oracles_obey_amdahl():
    assert FakeOracle(2.0, 50.0, 0.5).step_seconds(4) == 1.0
    assert FakeOracle(2.0, 50.0, 0.5).remaining_steps() == 50.0


def test_the_model_behaves_like_one():
    model = goodput_model()
    speeds = [model.goodput(1, k) for k in (1, 2, 4)]
    assert speeds == sorted(speeds)
    assert model.goodput(2, 4) < model.goodput(1, 4)


def test_after_keeps_the_books():
    before = snapshot(jobs=[job("a", largest_gpus=2), job("b"), job("c", largest_gpus=1)], running={"a": "n0:2"})
    decision = Decision({"a": place("n0:2"), "b": place("n1:4"), "c": place("")}, memory="m")
    then = after(before, decision, 60.0)
    assert (then.now, then.revision, then.memory) == (660.0, 2, "m")
    assert then.running == {"a": place("n0:2"), "b": place("n1:4")}
    assert [(view.attained_gpu_seconds, view.num_restarts, view.largest_gpus) for view in then.jobs] == [
        (120.0, 0, 2),
        (240.0, 0, 4),
        (0.0, 0, 1),
    ]
    moved = after(then, Decision({"a": place("n1:1"), "c": place("n0:2")}))
    assert [(view.num_restarts, view.largest_gpus) for view in moved.jobs] == [(1, 2), (0, 4), (1, 2)]
