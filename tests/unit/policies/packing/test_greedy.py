from pollux.core import Cluster, Node, Queue, Snapshot, check
from pollux.policies.packing.greedy import admit, admit_in_turn, wanted_gpus
from pollux.testing import cluster, job, snapshot


def placed(decision, seen: Snapshot) -> dict[str, str]:
    assert check(seen, decision) == ()
    return {job_id: str(placement) for job_id, placement in decision.allocation.items()}


def codes(decision) -> dict[str, str]:
    return {job_id: reason.code for job_id, reason in decision.reasons.items()}


def test_wanted_is_the_request_within_limits():
    assert wanted_gpus(job("j", requested_gpus=4)) == 4
    assert wanted_gpus(job("j", requested_gpus=4, max_gpus=2)) == 2
    assert wanted_gpus(job("j", requested_gpus=1, min_gpus=2)) == 2


def test_jobs_are_admitted_in_order_and_what_does_not_fit_is_skipped():
    seen = snapshot(cluster(4), [job("a", requested_gpus=3), job("b", requested_gpus=2), job("c")])
    decision = admit(seen, seen.jobs)
    assert placed(decision, seen) == {"a": "n0:3", "c": "n0:1"}
    assert decision.reasons["b"].code == "waits-for-gpus"
    assert decision.reasons["b"].numbers == {"gpus": 2, "free_gpus": 0}


def test_admitted_jobs_keep_their_place_and_others_lose_theirs():
    views = [job("new", requested_gpus=4), job("stays", requested_gpus=3), job("goes", requested_gpus=4)]
    seen = snapshot(cluster(4, 4), views, {"stays": "n1:3", "goes": "n0:4"})
    assert placed(admit(seen, views), seen) == {"stays": "n1:3", "new": "n0:4"}


def test_a_job_of_another_size_than_it_asks_for_is_placed_anew():
    views = [job("a", requested_gpus=2)]
    seen = snapshot(cluster(4, 4), views, {"a": "n1:3"})
    assert placed(admit(seen, views), seen) == {"a": "n0:2"}


def test_jobs_that_nobody_may_stop_come_first():
    views = [job("a", requested_gpus=8), job("p", pinned=True), job("s", preemptible=False, requested_gpus=2)]
    seen = snapshot(cluster(4, 4), views, {"p": "n0:1", "s": "n1:2"})
    assert placed(admit(seen, views), seen) == {"p": "n0:1", "s": "n1:2"}


def test_a_job_that_fits_nowhere_neither_keeps_out_nor_stops_others():
    nodes = cluster(4, 4, gpu_type="a100")
    views = [
        job("h", requested_gpus=8, gpu_types=("h100",)),
        job("a", requested_gpus=4),
        job("b", requested_gpus=4),
    ]
    seen = snapshot(nodes, views, {"a": "n0:4"})
    decision = admit(seen, views)
    assert placed(decision, seen) == {"a": "n0:4", "b": "n1:4"}
    assert codes(decision) == {"h": "fits-nowhere"}


def test_a_job_that_no_free_gpus_suit_does_not_stop_others_either():
    nodes = Cluster.of([Node("t", 4, "t4"), Node("a", 4, "a100")])
    first = job("first", requested_gpus=4, gpu_types=("t4",))
    second = job("second", requested_gpus=4, gpu_types=("t4",))
    third = job("third", requested_gpus=4, gpu_types=("a100",))
    seen = snapshot(nodes, [first, second, third], {"third": "a:4"})
    decision = admit(seen, [first, second, third])
    assert placed(decision, seen) == {"first": "t:4", "third": "a:4"}
    assert codes(decision) == {"second": "waits-for-gpus"}


def test_whoever_was_left_out_gets_what_remains():
    nodes = Cluster.of([Node("n0", 2), Node("n1", 2)])
    near = job("near", requested_gpus=2, max_nodes=1)
    views = [job("a"), job("b"), near]
    seen = snapshot(nodes, views, {"a": "n0:1", "b": "n1:1"})
    decision = admit(seen, views)
    assert placed(decision, seen) == {"a": "n0:1", "b": "n1:1"}
    assert codes(decision) == {"near": "no-room"}


def test_a_quota_that_is_used_up_is_told_apart():
    views = [job("a", queue="q", requested_gpus=2), job("b", queue="q"), job("c")]
    seen = snapshot(cluster(4), views, queues=[Queue("q", gpu_quota=2)])
    decision = admit(seen, views)
    assert placed(decision, seen) == {"a": "n0:2", "c": "n0:1"}
    assert codes(decision) == {"b": "waits-for-quota"}


def test_gpus_held_on_a_closed_node_are_not_taken_from_the_rest():
    nodes = Cluster.of([Node("n0", 4, schedulable=False), Node("n1", 4)])
    views = [job("a", requested_gpus=4), job("b", requested_gpus=4)]
    seen = snapshot(nodes, views, {"a": "n0:4"})
    assert placed(admit(seen, views), seen) == {"a": "n0:4", "b": "n1:4"}


def test_jobs_on_a_node_that_shrank_move():
    views = [job("a", requested_gpus=2), job("b", requested_gpus=2)]
    seen = snapshot(cluster(2, 4), views, {"a": "n0:2", "b": "n0:2"})
    assert placed(admit(seen, views), seen) == {"a": "n0:2", "b": "n1:2"}


def test_a_steady_job_shrinks_in_place_moves_or_stays():
    shrinks = job("shrinks", preemptible=False, max_gpus=2, requested_gpus=2)
    moves = job("moves", preemptible=False, gpu_types=("t4",), requested_gpus=2)
    stays = job("stays", preemptible=False, min_gpus=9, requested_gpus=9)
    nodes = Cluster.of([Node("n0", 8, "a100"), Node("n1", 4, "t4")])
    seen = snapshot(nodes, [shrinks, moves, stays], {"shrinks": "n0:4", "moves": "n0:2", "stays": "n0:2"})
    assert placed(admit(seen, seen.jobs), seen) == {"shrinks": "n0:2", "moves": "n1:2", "stays": "n0:2"}


def test_in_turn_nobody_who_runs_is_stopped():
    views = [job("first", requested_gpus=4), job("small"), job("large", requested_gpus=3)]
    seen = snapshot(cluster(4), views, {"large": "n0:3"})
    strict = admit_in_turn(seen, views, strict=True)
    assert placed(strict, seen) == {"large": "n0:3"}
    assert codes(strict) == {"first": "waits-for-gpus", "small": "behind-another"}
    lenient = admit_in_turn(seen, views, strict=False)
    assert placed(lenient, seen) == {"large": "n0:3", "small": "n0:1"}


def test_in_turn_a_job_that_fits_nowhere_blocks_nobody():
    views = [job("never", requested_gpus=9), job("b")]
    seen = snapshot(cluster(4), views)
    decision = admit_in_turn(seen, views, strict=True)
    assert placed(decision, seen) == {"b": "n0:1"}
    assert codes(decision) == {"never": "fits-nowhere"}


def test_in_turn_a_running_job_that_must_move_goes_before_those_that_wait():
    views = [job("waits", requested_gpus=2), job("moves", requested_gpus=2)]
    seen = snapshot(cluster(1, 2), views, {"moves": "n0:2"})
    assert placed(admit_in_turn(seen, views, strict=True), seen) == {"moves": "n1:2"}
