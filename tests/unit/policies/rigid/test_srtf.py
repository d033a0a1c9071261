from pollux.policies.rigid.srtf import Srtf
from pollux.testing import FakeOracle, cluster, job, snapshot


def served(*views, held=None):
    return set(Srtf().allocate(snapshot(cluster(4), views, held)).allocation)


def lasting(job_id: str, steps: float, submitted_at: float = 0.0, **fields):
    oracle = FakeOracle(parallel_seconds=4.0, serial_seconds=0.0, steps=steps)
    return job(job_id, submitted_at, **{"requested_gpus": 4, "oracle": oracle, **fields})


def test_the_shortest_goes_first_and_preempts():
    assert served(lasting("long", 100.0), lasting("short", 99.0, 50.0), held={"long": "n0:4"}) == {"short"}


def test_time_is_that_on_the_gpus_it_would_get():
    """At one GPU a step takes four seconds, at four one."""
    assert served(lasting("wide", 30.0), lasting("narrow", 10.0, requested_gpus=1, max_gpus=1)) == {"wide"}
    assert served(lasting("capped", 30.0, max_gpus=3), lasting("wide", 35.0)) == {"wide"}


def test_ties_go_to_the_earlier():
    assert served(lasting("late", 10.0, 9.0), lasting("early", 10.0, 1.0)) == {"early"}


def test_a_job_that_nobody_knows_comes_first():
    assert served(lasting("known", 1.0), job("unknown", 50.0, requested_gpus=4)) == {"unknown"}
