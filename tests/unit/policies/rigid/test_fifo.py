from pollux.policies.rigid.fifo import Fifo
from pollux.testing import cluster, job, snapshot


def running(policy, *views, nodes=None, held=None):
    decision = policy.allocate(snapshot(nodes or cluster(4), views, held))
    return set(decision.allocation)


def test_first_come_first_served():
    late, early = job("late", 20.0, requested_gpus=4), job("early", 10.0, requested_gpus=4)
    assert running(Fifo(), late, early) == {"early"}


def test_the_order_of_the_snapshot_breaks_ties():
    assert running(Fifo(), job("b", requested_gpus=4), job("a", requested_gpus=4)) == {"b"}


def test_the_head_of_the_line_blocks_only_when_strict():
    views = [job("a", 1.0, requested_gpus=3), job("b", 2.0, requested_gpus=3), job("c", 3.0)]
    assert running(Fifo(), *views) == {"a"}
    assert running(Fifo(strict=False), *views) == {"a", "c"}


def test_nobody_is_preempted_by_an_earlier_job():
    views = [job("early", 1.0, requested_gpus=4), job("late", 2.0, requested_gpus=2)]
    assert running(Fifo(), *views, held={"late": "n0:2"}) == {"late"}


def test_a_running_job_keeps_even_what_it_did_not_ask_for():
    decision = Fifo().allocate(snapshot(cluster(4), [job("a", requested_gpus=4)], {"a": "n0:2"}))
    assert str(decision.allocation["a"]) == "n0:2"
