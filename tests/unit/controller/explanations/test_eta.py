"""When jobs end, and how good that was."""

import pytest

from pollux.controller import JobFinished, JobPaused, JobReported, JobRunning
from pollux.controller.explanations.eta import EtaScore, Interval, Uncertainty, eta, most_gpus
from pollux.core import JobLimits, Node, Queue, Reason
from pollux.testing import SaturatingGoodput, cluster, place, snapshot

CERTAIN = Uncertainty(least=0.0, first=0.0)
LINEAR = SaturatingGoodput(rate=10.0)


@pytest.fixture
def running(desk):
    desk.submit(0, "a", "b", max_gpus=8)
    desk.decide(0, a="n0:2")
    for job_id, work in (("a", 1200.0), ("b", 400.0)):
        desk(JobReported(10, job_id, LINEAR, work))
    return desk.controller


def expected(controller, job_id, now=10.0, uncertainty=CERTAIN):
    return eta(controller.jobs[job_id], controller.snapshot(now), controller.jobs, uncertainty)


def test_now_best_and_worst(running):
    assert expected(running, "a") == (60.0, 15.0, 60.0), "2 GPUs now, 8 at best, 2 of the fair 4 at worst"


def test_a_job_above_its_fair_share_may_lose_it(desk):
    desk.submit(0, "a", "b", max_gpus=8)
    desk.decide(0, a="n0:4 n1:4")
    desk(JobReported(10, "a", LINEAR, 1200.0))
    assert expected(desk.controller, "a") == (15.0, 15.0, 30.0)


def test_little_history_makes_it_wider(running):
    running.apply(JobRunning(10.0, "a", 1))
    early, late = (expected(running, "a", now, None) for now in (10.0, 5000.0))
    assert early.current == late.current
    assert early.low < late.low < 15.0
    assert 60.0 < late.high < early.high
    assert (Uncertainty().after(0.0), Uncertainty().after(300.0)) == (0.6, 0.35)


def test_who_waits_first_waits_for_those_in_the_way(running):
    assert expected(running, "b") == (None, 5.0, 40.0), "10 seconds of work and 30 to start, if nobody is named"
    running.jobs["b"].set_reason(10.0, Reason("waits-for-gpus", jobs=("a",)))
    assert expected(running, "b") == (None, 65.0, 100.0)
    assert eta(running.jobs["b"], running.snapshot(10.0), uncertainty=CERTAIN) == (None, 65.0, 100.0)


def test_who_waits_after_a_crash_waits_for_that_too(running):
    running.jobs["b"].eligible_at = 30.0
    assert expected(running, "b") == (None, 25.0, 60.0)


def test_who_follows_others_waits_for_the_last(desk):
    desk.submit(0, "a", "b", max_gpus=8)
    desk.submit(0, "c", after=("a", "b"), max_gpus=8)
    desk.submit(0, "d", after=("c",), max_gpus=8)
    desk.decide(0, a="n0:2", b="n1:2")
    for job_id, work in (("a", 1200.0), ("b", 400.0), ("c", 800.0), ("d", 80.0)):
        desk(JobReported(10, job_id, LINEAR, work))
    # A third job's fair share is 3 GPUs of 8; a start costs 30 seconds.
    assert expected(desk.controller, "c") == (None, 70.0, pytest.approx(60.0 + 800 / 30 + 30.0))
    last = 60.0 + 800 / 30
    assert expected(desk.controller, "d") == (None, pytest.approx(last + 1.0), pytest.approx(last + 80 / 30 + 30.0))
    desk.controller.jobs["b"].remaining = None
    assert expected(desk.controller, "c") is None


def test_what_nobody_can_tell_is_none(running):
    running.apply(JobReported(20, "a", SaturatingGoodput(rate=0.0)))
    assert expected(running, "a") is None
    running.apply(JobPaused(30, "b"))
    assert expected(running, "b") is None
    running.apply(JobFinished(30, "a"))
    assert expected(running, "a") is None


def test_without_model_or_remaining_work_there_is_none(desk):
    desk.submit(0, "a")
    assert expected(desk.controller, "a") is None
    desk(JobReported(10, "a", LINEAR))
    assert expected(desk.controller, "a") is None


@pytest.mark.parametrize(
    ("limits", "queue", "most"),
    [
        (JobLimits(), "", 8),
        (JobLimits(max_gpus=3), "", 3),
        (JobLimits(gpu_types=("t4",)), "", 2),
        (JobLimits(mixed_types=True), "", 10),
        (JobLimits(min_gpus=9), "", 0),
        (JobLimits(), "small", 5),
        (JobLimits(min_gpus=6), "small", 0),
    ],
)
def test_the_most_that_a_job_could_have(limits, queue, most):
    nodes = [*cluster(4, 4).nodes, Node("t", 2, "t4"), Node("closed", 4, "t4", schedulable=False)]
    seen = snapshot(cluster(1).of(nodes), queues=[Queue("small", gpu_quota=5)])
    assert most_gpus(seen, limits, queue) == most


def test_scores():
    given = [Interval(0, 90, 110), Interval(50, 60, 80), Interval(80, 95, 105), Interval(100, 0, 1)]
    score = EtaScore.of(given, 100)
    assert (score.count, score.coverage) == (3, pytest.approx(2 / 3))
    assert score.relative_width == pytest.approx((20 / 100 + 20 / 50 + 10 / 20) / 3)
    assert EtaScore.of([], 100) is None
    assert EtaScore.of(given, 0) is None


def test_scores_of_several_jobs_are_weighed_by_their_number():
    together = EtaScore.together([EtaScore(1, 1.0, 0.5), EtaScore(3, 0.0, 0.1)])
    assert together == EtaScore(4, 0.25, pytest.approx(0.2))
    assert EtaScore.together([]) is None


def test_the_placement_counts_not_only_its_size(desk):
    desk.submit(0, "a")
    desk.decide(0, a="n0:1 n1:1")
    desk(JobReported(10, "a", SaturatingGoodput(rate=10.0, across_nodes=0.5), 100.0))
    assert desk.controller.jobs["a"].placement == place("n0:1 n1:1")
    assert expected(desk.controller, "a").current == 10.0
