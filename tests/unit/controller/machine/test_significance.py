"""Which reports become facts."""

import pytest

from pollux.controller import JobCancelled, JobReported
from pollux.core import UnknownName
from pollux.testing import SaturatingGoodput


@pytest.fixture
def reported(desk):
    desk.submit(0, "a")
    desk.decide(10, a="n0:2")
    desk(JobReported(20, "a", SaturatingGoodput(rate=100.0, knee=8.0), 1000.0, 10.0, 64))
    return desk.controller


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"remaining": 981.0}, False),
        ({"remaining": 979.0}, True),
        ({"remaining": 1021.0}, True),
        ({"resize_cost_seconds": 10.9}, False),
        ({"resize_cost_seconds": 11.1}, True),
        ({"local_batch": 66}, False),
        ({"local_batch": 128}, True),
        ({"goodput": SaturatingGoodput(rate=101.9, knee=8.0)}, False),
        ({"goodput": SaturatingGoodput(rate=102.1, knee=8.0)}, True),
        ({"goodput": SaturatingGoodput(rate=97.9, knee=8.0)}, True),
    ],
)
def test_what_moved_far_enough_is_news(reported, fields, expected):
    assert reported.is_news(JobReported(30, "a", **fields)) is expected


def test_a_model_that_agrees_here_but_not_on_twice_as_much_is_news(reported):
    same_on_two = SaturatingGoodput(rate=100.0 * (1 + 1 / 2) / (1 + 1 / 8), knee=2.0)
    assert reported.is_news(JobReported(30, "a", same_on_two))


@pytest.mark.parametrize(
    "fields", [{"goodput": SaturatingGoodput()}, {"remaining": 1.0}, {"local_batch": 1}, {"resize_cost_seconds": 1.0}]
)
def test_what_was_not_known_is_news(desk, fields):
    desk.submit(0, "a")
    assert desk.controller.is_news(JobReported(30, "a", **fields))


def test_a_waiting_job_may_have_news_of_its_work_but_not_of_its_speed(desk):
    desk.submit(0, "a")
    desk(JobReported(20, "a", SaturatingGoodput(), 1000.0))
    assert not desk.controller.is_news(JobReported(30, "a", SaturatingGoodput(rate=1.0)))
    assert desk.controller.is_news(JobReported(30, "a", remaining=500.0))


def test_ended_jobs_have_no_news_and_unknown_ones_are_refused(reported):
    reported.apply(JobCancelled(30, "a"))
    assert not reported.is_news(JobReported(40, "a", SaturatingGoodput(), 1.0))
    with pytest.raises(UnknownName, match="unknown job 'b'"):
        reported.is_news(JobReported(40, "b"))
