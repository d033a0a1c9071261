from dataclasses import dataclass

from pollux.core import Cluster, Node, Queue, Snapshot, check
from pollux.policies.elastic.optimus import OptimusOracle
from pollux.testing import FakeOracle, cluster, job, place, snapshot


def counts(seen: Snapshot) -> dict[str, int]:
    decision = OptimusOracle().allocate(seen)
    assert check(seen, decision) == ()
    return {job_id: placement.num_gpus for job_id, placement in decision.allocation.items()}


def elastic(job_id: str, steps: float = 100.0, **fields):
    oracle = FakeOracle(parallel_seconds=1.0, serial_seconds=0.0, steps=steps)
    return job(job_id, **{"oracle": oracle, "max_gpus": 64, **fields})


@dataclass(frozen=True)
class Table:
    """Step seconds by GPUs, from one on."""

    seconds: tuple[float, ...]
    steps: float = 1.0

    def step_seconds(self, num_gpus: int) -> float:
        return self.seconds[num_gpus - 1]

    def remaining_steps(self) -> float:
        return self.steps


def test_everybody_gets_one_while_gpus_last():
    views = [elastic(f"j{i}", steps=10.0**i) for i in range(6)]
    assert counts(snapshot(cluster(4), views)) == {"j0": 1, "j1": 1, "j2": 1, "j3": 1}


def test_the_larger_gain_gets_the_next_gpu():
    """Gains are Q·(1/k − 1/(k+1)); at k = 4 and 1 they tie, and the first goes first."""
    assert counts(snapshot(cluster(4, 4), [elastic("a", 100.0), elastic("b", 10.0)])) == {"a": 6, "b": 2}
    assert counts(snapshot(cluster(4, 4), [elastic("a", 100.0), elastic("b", 1.0)])) == {"a": 7, "b": 1}


def test_ties_go_to_the_first():
    assert counts(snapshot(cluster(4, 1), [elastic("a"), elastic("b")])) == {"a": 3, "b": 2}


def test_gpus_that_gain_nothing_stay_idle():
    slower = job("slower", oracle=Table((1.0, 0.5, 0.6, 0.1)), max_gpus=4)
    assert counts(snapshot(cluster(4), [slower])) == {"slower": 2}


def test_limits_and_missing_oracles_bound_the_count():
    views = [elastic("most", max_gpus=2), elastic("least", min_gpus=3), job("unknown")]
    assert counts(snapshot(cluster(8, 8), views)) == {"most": 2, "least": 13, "unknown": 1}


def test_small_minimums_go_first():
    views = [elastic("large", min_gpus=4), elastic("small")]
    assert counts(snapshot(cluster(4), views)) == {"small": 4}


def test_unchanged_counts_keep_their_place_others_move_smallest_first():
    views = [elastic("stays", max_gpus=2), elastic("large", max_gpus=4), elastic("small", max_gpus=3)]
    seen = snapshot(cluster(4, 4, 4), views, {"stays": "n1:2", "large": "n0:1", "small": "n1:1"})
    decision = OptimusOracle().allocate(seen)
    assert decision.allocation == {"stays": place("n1:2"), "small": place("n0:3"), "large": place("n2:4")}


def test_pinned_jobs_count_and_stay():
    views = [elastic("p", pinned=True), elastic("a")]
    seen = snapshot(cluster(4, 4), views, {"p": "n0:1 n1:1"})
    assert OptimusOracle().allocate(seen).allocation["p"] == place("n0:1 n1:1")
    assert counts(seen) == {"p": 2, "a": 6}


def test_steady_jobs_shrink_to_make_room_but_never_below_their_minimum():
    views = [elastic("s", steps=1.0, preemptible=False, min_gpus=2), *(elastic(f"j{i}") for i in range(8))]
    found = counts(snapshot(cluster(4, 4), views, {"s": "n0:4 n1:4"}))
    assert found.pop("s") == 2
    assert sum(found.values()) == 6


def test_steady_jobs_do_not_push_each_other_out():
    nodes = Cluster.of([Node("n0", 4, "a100"), Node("n1", 4, "t4")])
    first = elastic("first", preemptible=False, max_gpus=8)
    second = elastic("second", preemptible=False, gpu_types=("a100",), min_gpus=2)
    found = counts(snapshot(nodes, [first, second], {"first": "n1:4", "second": "n0:2"}))
    assert found["second"] >= 2


def test_a_quota_stops_the_growth_of_its_queue_only():
    views = [elastic("a", queue="q"), elastic("b", queue="q"), elastic("c", steps=1.0)]
    assert counts(snapshot(cluster(8), views, queues=[Queue("q", gpu_quota=3)])) == {"a": 2, "b": 1, "c": 5}


def test_gpus_that_suit_nobody_else_are_not_counted_for_a_job():
    """A job for the small type does not reserve what only the other can use."""
    nodes = Cluster.of([Node("t", 2, "t4"), Node("a", 8, "a100")])
    small = elastic("small", steps=1e6, gpu_types=("t4",))
    found = counts(snapshot(nodes, [small, elastic("a"), elastic("b")]))
    assert found["small"] == 2
    assert found["a"] + found["b"] == 8


def test_a_job_that_fits_nowhere_is_told_so_and_takes_nothing():
    views = [elastic("h", steps=1e9, gpu_types=("h100",)), elastic("a")]
    seen = snapshot(cluster(4), views)
    assert counts(seen) == {"a": 4}
    assert set(OptimusOracle().allocate(seen).reasons) == {"h"}
