"""Jobs that wait for others."""

import pytest

from pollux.controller import GenerationEnded, JobCancelled, JobFinished, JobPaused, JobResumed, JobState
from pollux.core import UnknownName


def shown(desk):
    return [job.id for job in desk.controller.snapshot(1000).jobs]


def test_a_job_is_shown_once_all_that_it_follows_have_succeeded(make_desk):
    desk = make_desk(trigger="events")
    desk.submit(0, "a", "b")
    desk.submit(1, "c", after=("a", "b"))
    assert desk.controller.jobs["c"].waiting_for == ("a", "b")
    assert (desk.controller.jobs["c"].reason.code, desk.controller.jobs["c"].reason.jobs) == (
        "waits-for-job",
        ("a", "b"),
    )
    assert shown(desk) == ["a", "b"]
    desk(JobFinished(10, "a"))
    assert (shown(desk), desk.controller.jobs["c"].waiting_for) == (["b"], ("b",))
    desk.decide(10, b="n0:1")
    desk(GenerationEnded(20, "b", 1, "succeeded"))
    assert shown(desk) == ["c"]
    assert desk.controller.next_decision_at == 20


def test_what_has_succeeded_already_is_not_waited_for(desk):
    desk.submit(0, "a")
    desk(JobFinished(10, "a"))
    desk.submit(20, "b", after=("a",))
    assert shown(desk) == ["b"]


def test_a_job_to_follow_must_be_known(desk):
    desk.submit(0, "train")
    with pytest.raises(UnknownName, match="unknown job to run after 'trian': did you mean 'train'"):
        desk.submit(1, "test", after=("trian",))
    with pytest.raises(UnknownName):
        desk.submit(1, "self", after=("self",))
    assert list(desk.controller.jobs) == ["train"]


@pytest.mark.parametrize("end", [JobCancelled(10, "a"), JobFinished(10, "a", "failed")])
def test_who_follows_a_job_that_fails_fails_too_all_along_the_chain(desk, end):
    desk.submit(0, "a", "x")
    desk.submit(1, "b", after=("a", "x"))
    desk.submit(2, "c", after=("b",))
    desk(JobPaused(3, "c"))
    desk(end)
    state = desk.controller.jobs["a"].state
    records = [desk.controller.jobs[job_id] for job_id in "bc"]
    assert [(record.state, record.ended_at) for record in records] == [(JobState.FAILED, 10)] * 2
    assert [record.detail for record in records] == [
        f"it was to run after job 'a', which is {state}",
        "it was to run after job 'b', which is failed",
    ]
    assert shown(desk) == ["x"]


def test_a_long_chain_falls_at_once(desk):
    desk.submit(0, "j0")
    for i in range(1, 1500):
        desk.submit(1, f"j{i}", after=(f"j{i - 1}",))
    desk(JobCancelled(2, "j0"))
    assert not desk.controller.active


def test_who_comes_too_late_fails_at_once(desk):
    desk.submit(0, "a")
    desk(JobCancelled(1, "a"))
    desk.submit(2, "b", after=("a",))
    record = desk.controller.jobs["b"]
    assert (record.state, record.reason.code, record.reason.jobs) == ("failed", "dependency-failed", ("a",))
    assert record.detail == "it was to run after job 'a', which is cancelled"


def test_resuming_does_not_overtake(desk):
    desk.submit(0, "a")
    desk.submit(0, "b", after=("a",))
    desk(JobPaused(1, "b"))
    desk(JobResumed(2, "b"))
    assert shown(desk) == ["a"]
    assert desk.controller.jobs["b"].reason.code == "waits-for-job"
