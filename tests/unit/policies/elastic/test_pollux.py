"""What the solver decides in situations small enough to see the right answer."""

import math
from dataclasses import replace

import pytest

from pollux.core import Cluster, InvalidInput, Node, Queue, check
from pollux.policies.elastic.pollux import Pollux
from pollux.testing import SaturatingGoodput, cluster, goodput_model, job, place, snapshot

LINEAR = SaturatingGoodput()
FLAT = SaturatingGoodput(knee=1.0)


def grown(name, goodput=LINEAR, max_gpus=64, **fields):
    """A job that may have any number of GPUs: the doubling rule does not bind."""
    return job(name, goodput=goodput, largest_gpus=64, max_gpus=max_gpus, **fields)


def counts(view, **options):
    decision = Pollux(**options).allocate(view)
    assert check(view, decision) == ()
    return {job.id: decision.allocation[job.id].num_gpus if job.id in decision.allocation else 0 for job in view.jobs}


def test_equal_jobs_share_equally():
    view = snapshot(cluster(4, 4), [grown("a"), grown("b"), grown("c"), grown("d")])
    assert counts(view) == {"a": 2, "b": 2, "c": 2, "d": 2}


def test_gpus_go_where_they_help():
    view = snapshot(cluster(4, 4), [grown("scales"), grown("flat", FLAT)])
    given = counts(view)
    assert given["scales"] >= 4
    assert given["flat"] == 1


def test_without_fairness_the_whole_goes_to_whoever_gains_most():
    steep = SaturatingGoodput(rate=100.0)
    slow = SaturatingGoodput(knee=2.0)
    view = snapshot(cluster(4, 4), [grown("steep", steep), grown("slow", slow)])
    assert counts(view, fairness=1.0)["steep"] >= counts(view, fairness=-10.0)["steep"]


def test_a_new_job_starts_with_one_gpu_and_doubles():
    view = snapshot(cluster(4, 4), [job("a", goodput=LINEAR, max_gpus=64)])
    assert counts(view) == {"a": 1}
    once = snapshot(cluster(4, 4), [job("a", goodput=LINEAR, max_gpus=64, largest_gpus=2)], {"a": "n0:2"})
    assert counts(once) == {"a": 4}


def test_an_unmeasured_job_of_age_zero_starts_when_there_is_room():
    newcomer = replace(job("new"), submitted_at=1000.0)
    view = replace(snapshot(cluster(4), [newcomer]), now=1000.0)
    assert counts(view) == {"new": 1}


def test_who_gains_nothing_stays_where_it_is():
    view = snapshot(cluster(4, 4), [grown("a"), grown("b")], {"a": "n0:4", "b": "n1:4"})
    decision = Pollux().allocate(view)
    assert decision.allocation == {"a": place("n0:4"), "b": place("n1:4")}
    assert decision.reasons == {}


def test_a_job_worn_out_by_restarts_is_left_alone():
    worn = replace(grown("a"), submitted_at=0.0, num_restarts=40)
    view = replace(snapshot(cluster(4, 4), [worn], {"a": "n0:1"}), now=1000.0)
    assert Pollux().allocate(view).allocation == {"a": place("n0:1")}


def test_a_cheap_resize_is_taken_where_a_dear_one_is_not():
    def after(cost):
        young = replace(grown("a", SaturatingGoodput(knee=8.0)), submitted_at=900.0, resize_cost_seconds=cost)
        return counts(replace(snapshot(cluster(4), [young], {"a": "n0:2"}), now=1000.0))["a"]

    assert after(1.0) == 4
    assert after(500.0) == 2


def test_small_jobs_make_way_for_one_that_needs_a_whole_node():
    jobs = [grown("wide", min_gpus=4), job("s1", goodput=LINEAR, max_gpus=1), job("s2", goodput=LINEAR, max_gpus=1)]
    view = snapshot(cluster(4, 4), jobs, {"s1": "n0:1", "s2": "n1:1"})
    decision = Pollux().allocate(view)
    assert decision.allocation["wide"].num_nodes == 1
    assert len({decision.allocation["s1"], decision.allocation["s2"]}) == 1


def test_distributed_jobs_keep_off_each_others_nodes_unless_told_otherwise():
    jobs = [grown("a", min_gpus=6), grown("b", min_gpus=6)]
    view = snapshot(cluster(4, 4, 4), jobs)
    assert sorted(counts(view).values()) == [0, 12]
    assert sorted(counts(view, avoid_interference=False).values()) == [6, 6]
    isolated = Cluster(tuple(Node(f"n{i}", 4, isolated_network=True) for i in range(3)))
    assert sorted(counts(replace(view, cluster=isolated)).values()) == [6, 6]


def test_heavier_jobs_get_more():
    view = snapshot(cluster(4, 4, 4, 4), [grown("heavy", weight=16.0), grown("light")])
    assert counts(view) == {"heavy": 12, "light": 4}


def test_a_quota_holds_even_when_gpus_are_idle():
    jobs = [grown("a", queue="q"), grown("b", queue="q"), grown("c")]
    view = replace(snapshot(cluster(4, 4), jobs), queues={"q": Queue("q", gpu_quota=2)})
    given = counts(view)
    assert given["a"] + given["b"] == 2
    assert given["c"] == 4


def test_each_job_on_the_gpu_type_it_is_fast_on():
    fast_on_a = SaturatingGoodput(speed={"a": 4.0, "b": 1.0})
    fast_on_b = SaturatingGoodput(speed={"a": 1.0, "b": 4.0})
    nodes = Cluster((Node("n0", 4, "a"), Node("n1", 4, "b")))
    view = replace(snapshot(cluster(4, 4), [grown("x", fast_on_a), grown("y", fast_on_b)]), cluster=nodes)
    decision = Pollux().allocate(view)
    assert decision.allocation == {"x": place("n0:4"), "y": place("n1:4")}


def test_idle_gpus_of_a_node_are_added_to_its_jobs():
    """Three does not divide a node of four, so it is not planned; but nobody else can use the GPU."""
    jobs = [job("a", goodput=LINEAR, largest_gpus=8, max_gpus=3)]
    assert counts(snapshot(cluster(4), jobs)) == {"a": 3}


def test_a_waiting_job_takes_scattered_gpus():
    full = {"a": "n0:3", "b": "n1:3"}
    jobs = [job(name, goodput=LINEAR, preemptible=False, min_gpus=3, max_gpus=3) for name in full]
    view = snapshot(cluster(4, 4), [*jobs, job("w", goodput=LINEAR, min_gpus=2, max_gpus=2)], full)
    assert Pollux().allocate(view).allocation["w"] == place("n0:1 n1:1")


def test_reasons_carry_the_numbers():
    view = snapshot(
        cluster(4), [grown("a"), grown("b"), job("c", goodput=LINEAR, min_gpus=4, max_gpus=4)], {"a": "n0:4"}
    )
    decision = Pollux().allocate(view)
    reason = decision.reasons["a"]
    assert reason.code == "shrank"
    assert reason.numbers["gpus_before"] == 4
    assert reason.numbers["gpus_after"] == decision.allocation["a"].num_gpus
    assert reason.numbers["speedup_before"] > reason.numbers["speedup_after"] > 0
    assert decision.reasons["c"].code == "waits-for-gpus"
    assert decision.reasons["b"].code == "started"


def test_many_real_models_fill_the_cluster():
    jobs = [grown(f"j{i}", goodput_model(noise_scale=200.0 * (i + 1))) for i in range(10)]
    assert sum(counts(snapshot(cluster(*[4] * 16), jobs)).values()) >= 60


@pytest.mark.parametrize("power", [-10.0, -1.0, 0.0, 0.5, 1.0])
def test_every_power_gives_a_legal_answer(power):
    jobs = [grown(f"j{i}", goodput_model(noise_scale=100.0 * (i + 1))) for i in range(5)]
    assert sum(counts(snapshot(cluster(4, 4, 4), jobs), fairness=power).values()) > 0


def test_a_power_that_is_no_number_is_refused():
    with pytest.raises(InvalidInput, match="fairness is inf"):
        Pollux(fairness=math.inf)


def test_a_job_about_to_end_is_not_resized_any_more():
    """100 useful samples a second on one GPU: with 2,000 left it ends before a resize of 30 s would be over."""

    def gpus(remaining):
        view = snapshot(cluster(4), [replace(grown("a"), remaining=remaining)], {"a": "n0:1"})
        return counts(view)["a"]

    assert gpus(2_000.0) == 1
    # 32 s left: on four GPUs it would take 8 s, after standing still for 30.
    assert gpus(3_200.0) == 1
    assert gpus(30_000.0) == 4
    assert gpus(None) == 4


def test_a_job_about_to_end_keeps_its_gpus_from_others():
    jobs = [replace(grown("ends"), remaining=1_000.0), grown("waits")]
    assert counts(snapshot(cluster(4), jobs, {"ends": "n0:4"})) == {"ends": 4, "waits": 0}
    lasting = [replace(grown("lasts"), remaining=1e9), grown("waits")]
    assert counts(snapshot(cluster(4), lasting, {"lasts": "n0:4"})) == {"lasts": 2, "waits": 2}


def test_a_waiting_job_does_not_send_away_what_is_dearer_than_its_gain():
    """Two idle GPUs cost nothing; four would cost a job its place that may hardly be moved any more."""
    worn = replace(job("worn", goodput=LINEAR, max_gpus=2, largest_gpus=2), submitted_at=0.0, num_restarts=1000)
    waits = replace(grown("waits", max_gpus=4), submitted_at=0.0)
    view = replace(snapshot(cluster(4), [worn, waits], {"worn": "n0:2"}), now=10_000.0)
    decision = Pollux().allocate(view)
    assert decision.allocation == {"worn": place("n0:2"), "waits": place("n0:2")}


def test_distributed_jobs_that_strand_gpus_are_moved():
    held = {f"h{i}": f"n{2 * i}:3 n{2 * i + 1}:3" for i in range(4)}
    jobs = [replace(grown(name), submitted_at=-1e6) for name in held] + [grown(f"w{i}") for i in range(4)]
    given = counts(snapshot(cluster(*[4] * 8), jobs, held))
    assert min(given.values()) >= 2
    assert sum(given.values()) == 32


def test_nodes_of_different_sizes_are_used_together():
    view = snapshot(cluster(8, 4, 4, 4), [grown("a"), grown("b")])
    assert sum(counts(view).values()) == 20
    assert counts(snapshot(cluster(8, 4, 4), [grown("a", min_gpus=16)])) == {"a": 16}


def test_a_job_for_which_nothing_counts_gets_its_minimum_only():
    newcomer = replace(grown("new"), submitted_at=1000.0)
    old = replace(grown("old"), submitted_at=0.0)
    view = replace(snapshot(cluster(4, 4), [newcomer, old]), now=1000.0)
    assert counts(view) == {"new": 1, "old": 4}


def test_jobs_about_to_end_do_not_make_way():
    jobs = [replace(grown(name, max_gpus=1), remaining=1.0) for name in "ab"]
    view = snapshot(cluster(4, 4), [*jobs, grown("c", min_gpus=4)], {"a": "n0:1", "b": "n1:1"})
    decision = Pollux().allocate(view)
    assert decision.allocation["a"] == place("n0:1")
    assert decision.allocation["b"] == place("n1:1")
