"""Why jobs got what they got: codes, numbers and the other jobs involved."""

import pytest

from pollux.core import Cluster, Decision, Node, Queue, Reason
from pollux.policies import create
from pollux.policies.reasons import Holders, change_code, named
from pollux.testing import FakeOracle, SaturatingGoodput, cluster, job, place, snapshot

KNEE = SaturatingGoodput(knee=4.0)


def grown(job_id, **fields):
    return job(job_id, goodput=KNEE, largest_gpus=8, **{"max_gpus": 16, **fields})


def reasons(view, policy="pollux", **options):
    return create(policy, **options).allocate(view).reasons


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (0, 0, "waits-for-gpus"),
        (2, 0, "preempted"),
        (0, 2, "started"),
        (2, 2, "moved"),
        (2, 4, "grew"),
        (4, 2, "shrank"),
    ],
)
def test_changes_have_words(before, after, code):
    assert change_code(before, after) == code


def test_at_most_three_are_named_the_largest_first():
    assert named([(1, "a"), (4, "b"), (4, "c"), (2, "d")]) == ("b", "c", "d")


def test_who_loses_hears_who_gained_and_how_much():
    found = reasons(snapshot(cluster(8), [grown("a"), grown("b"), grown("c")], {"a": "n0:8"}))
    numbers = found["a"].numbers
    assert (found["a"].code, found["a"].jobs) == ("shrank", ("b", "c"))
    assert (numbers["other_gpus_before"], numbers["other_gpus_after"]) == (0, 2)
    assert numbers["other_speedup_before"] == 0 < numbers["other_speedup_after"]
    assert numbers["speedup_before"] / numbers["speedup_after"] == pytest.approx(
        KNEE.goodput(1, 8) / KNEE.goodput(1, int(numbers["gpus_after"]))
    )
    assert (numbers["fair_gpus"], numbers["min_gpus"], numbers["max_gpus"]) == (3, 1, 16)
    assert found["b"].jobs == ()


def test_a_speed_up_across_nodes_is_told_as_well():
    found = reasons(snapshot(cluster(2, 2), [grown("a", min_gpus=3, max_gpus=3)]))
    assert found["a"].code == "started"
    assert found["a"].numbers["speedup_after"] == pytest.approx(KNEE.goodput(2, 3) / KNEE.goodput(1, 4))


@pytest.mark.parametrize("policy", ["pollux", "pollux-genetic", "las", "fifo"])
def test_who_waits_hears_who_holds_and_hears_it_again(policy):
    big = grown("big", min_gpus=6, max_gpus=6, requested_gpus=6, preemptible=False)
    small = grown("small", min_gpus=2, max_gpus=2, requested_gpus=2, preemptible=False)
    last = grown("last", min_gpus=3, max_gpus=3, requested_gpus=3, submitted_at=500.0)
    view = snapshot(cluster(8), [big, small, last], {"big": "n0:6", "small": "n0:2"})
    for _ in range(2):
        reason = reasons(view, policy)["last"]
        assert (reason.code, reason.jobs) == ("waits-for-gpus", ("big", "small"))
        assert (reason.numbers["gpus"], reason.numbers["free_gpus"]) == (3, 0)


def test_who_waits_for_its_quota_hears_who_of_its_queue_holds_it():
    view = snapshot(
        cluster(8),
        [grown("a", queue="q", pinned=True), grown("x", pinned=True), grown("b", queue="q", min_gpus=2)],
        {"a": "n0:2", "x": "n0:1"},
        queues=[Queue("q", gpu_quota=3)],
    )
    reason = reasons(view)["b"]
    assert (reason.code, reason.jobs) == ("waits-for-quota", ("a",))
    assert (reason.numbers["gpus"], reason.numbers["quota_left"]) == (2, 1)


def test_who_can_never_run_is_told_so():
    assert reasons(snapshot(cluster(4, 4), [grown("a", min_gpus=9)]))["a"].code == "fits-nowhere"
    assert reasons(snapshot(cluster(4, gpu_type="t4"), [grown("a", gpu_types=("h100",))]))["a"].code == "fits-nowhere"
    assert reasons(snapshot(Cluster(()), [grown("a", min_gpus=2)]))["a"] == Reason(
        "fits-nowhere", {"gpus": 2.0, "suitable_gpus": 0.0}
    )


@pytest.mark.parametrize("policy", ["pollux", "pollux-genetic", "fifo", "las", "tiresias", "srtf", "optimus-oracle"])
def test_every_policy_says_by_which_numbers_a_job_fits_nowhere(policy):
    node = Node("n0", 4, "t4", num_cpus=8.0, memory_bytes=2.0**30)
    wishes = {
        "many": ({"min_gpus": 9, "max_gpus": 9}, {"gpus": 9.0, "suitable_gpus": 4.0}),
        "typed": (
            {"gpu_types": ("h100",)},
            {"gpus": 1.0, "suitable_gpus": 0.0, "wanted_type:h100": 0.0, "other_type:t4": 4.0},
        ),
        "cpus": (
            {"cpus_per_gpu": 64.0},
            {"gpus": 1.0, "suitable_gpus": 0.0, "cpus_per_gpu": 64.0, "largest_node_cpus": 8.0},
        ),
        "memory": (
            {"memory_bytes_per_gpu": 2.0**40},
            {
                "gpus": 1.0, "suitable_gpus": 0.0, "memory_bytes_per_gpu": 2.0**40,
                "largest_node_memory_bytes": 2.0**30,
            },
        ),
        "quota": ({"min_gpus": 3, "max_gpus": 3, "queue": "q"}, {"gpus": 3.0, "queue_quota": 2.0}),
    }  # fmt: skip
    jobs = [grown(name, oracle=FakeOracle(), requested_gpus=fields.get("min_gpus", 1), **fields)
            for name, (fields, _) in wishes.items()]  # fmt: skip
    view = snapshot(Cluster((node,)), [grown("fine", oracle=FakeOracle()), *jobs], queues=[Queue("q", gpu_quota=2)])
    found = reasons(view, policy)
    assert {name: found[name] for name in wishes} == {
        name: Reason("fits-nowhere", numbers) for name, (_, numbers) in wishes.items()
    }


def test_a_speed_up_that_nobody_measured_is_called_assumed():
    young = job("young", largest_gpus=1, max_gpus=2)
    found = reasons(snapshot(cluster(2), [young], {"young": "n0:1"}))
    assert found["young"].code == "grew"
    assert found["young"].numbers["speedup_assumed"] == 1.0
    known = reasons(snapshot(cluster(2), [grown("known", max_gpus=2)], {"known": "n0:1"}))
    assert "speedup_assumed" not in known["known"].numbers


def test_free_gpus_that_do_not_suit_are_no_room():
    pinned = [grown(f"p{i}", pinned=True) for i in range(2)]
    view = snapshot(cluster(4, 4), [*pinned, grown("a", min_gpus=2, max_nodes=1)], {"p0": "n0:3", "p1": "n1:3"})
    reason = reasons(view)["a"]
    assert (reason.code, reason.numbers["free_gpus"]) == ("no-room", 2)


def test_who_is_behind_another_hears_behind_whom():
    sizes = {"run": 6, "big": 8, "next": 1}
    jobs = [grown(job_id, submitted_at=float(i), requested_gpus=sizes[job_id]) for i, job_id in enumerate(sizes)]
    assert reasons(snapshot(cluster(8), jobs, {"run": "n0:6"}), "fifo")["next"] == Reason(
        "behind-another", {"gpus": 1}, ("big",)
    )


def test_optimus_names_those_who_hold():
    jobs = [job("a", oracle=FakeOracle(), min_gpus=4, preemptible=False), job("b", oracle=FakeOracle())]
    reason = reasons(snapshot(cluster(4), jobs, {"a": "n0:4"}), "optimus-oracle")["b"]
    assert (reason.code, reason.jobs) == ("waits-for-gpus", ("a",))


def test_the_genetic_search_gives_reasons_for_changes_too():
    found = reasons(snapshot(cluster(8), [grown("a"), grown("b")], {"a": "n0:8"}), "pollux-genetic")
    assert (found["a"].code, found["b"].code) == ("shrank", "started")


def test_only_who_holds_anything_is_blamed():
    jobs = [job("a"), job("b"), job("c")]
    holders = Holders(snapshot(cluster(4), jobs), Decision({"a": place("n0:1"), "b": place("")}).allocation)
    assert holders.blamed(jobs[2], Reason("no-room")).jobs == ("a",)
    assert holders.blamed(jobs[2], Reason("fits-nowhere")).jobs == ()
