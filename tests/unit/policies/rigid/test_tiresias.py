import pytest

from pollux.core import InvalidInput
from pollux.policies.rigid.tiresias import Tiresias
from pollux.testing import after, cluster, job, snapshot


def wanting(job_id: str, gpu_seconds: float = 0.0, submitted_at: float = 0.0):
    return job(job_id, submitted_at, requested_gpus=4, attained_gpu_seconds=gpu_seconds)


def served(policy, seen):
    return list(policy.allocate(seen).allocation)


def test_a_job_sinks_at_the_published_threshold():
    below = snapshot(cluster(4), [wanting("old", 57_599.0), wanting("new")])
    above = snapshot(cluster(4), [wanting("old", 57_600.0), wanting("new")])
    assert served(Tiresias(), below) == ["old"]
    assert served(Tiresias(), above) == ["new"]


def test_within_a_queue_who_became_known_first_goes_first():
    assert served(Tiresias(), snapshot(cluster(4), [wanting("a", 100.0, 50.0), wanting("b", 0.0, 10.0)])) == ["a"]


def test_who_sinks_joins_the_end():
    """Two sink one after the other; the order in which they did counts, not that of submission."""
    policy, a, b = Tiresias(), "a", "b"
    seen = snapshot(cluster(4), [wanting(a), wanting(b, 57_600.0)])
    first = policy.allocate(seen)
    assert list(first.allocation) == [a]
    later = after(seen, first)
    sunk = snapshot(cluster(4), [wanting(a, 60_000.0), wanting(b, 57_600.0)], memory=later.memory)
    assert served(policy, sunk) == [b]
    forgotten = snapshot(cluster(4), [wanting(a, 60_000.0), wanting(b, 57_600.0)])
    assert served(policy, forgotten) == [a], "without memory, in order of the snapshot"


def test_jobs_that_are_gone_are_forgotten():
    policy = Tiresias()
    seen = snapshot(cluster(4), [wanting("a"), wanting("b")])
    decision = policy.allocate(snapshot(cluster(4), [wanting("b")], memory=policy.allocate(seen).memory))
    assert list(decision.allocation) == ["b"]
    assert decision.memory == policy.allocate(snapshot(cluster(4), [wanting("b")])).memory


def test_both_queues_are_walked():
    views = [wanting("sunk", 60_000.0), job("small", requested_gpus=1), wanting("new")]
    seen = snapshot(cluster(4, 4), views)
    assert set(served(Tiresias(), seen)) == {"new", "small"}
    views = [job("sunk", requested_gpus=3, attained_gpu_seconds=1e6), job("small"), wanting("new")]
    assert set(served(Tiresias(), snapshot(cluster(4, 4), views))) == {"new", "small", "sunk"}


def test_more_queues():
    policy = Tiresias((10.0, 100.0))
    views = [wanting("third", 100.0), wanting("second", 99.0), wanting("first", 9.0)]
    for expected in ("first", "second", "third"):
        assert served(policy, snapshot(cluster(4), views)) == [expected]
        views.pop()


def test_thresholds_must_rise():
    with pytest.raises(InvalidInput, match="rising order"):
        Tiresias((100.0, 10.0))
