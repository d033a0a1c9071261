"""Decisions as the log keeps them: only what changes, without the policy's memory."""

import pytest

from pollux.controller import DecisionMade, JobCancelled, JobPaused, NodeRemoved, ResizeJob, StartJob, StopJob
from pollux.core import NOWHERE, BrokenDecision, Decision, Reason
from pollux.testing import place


@pytest.fixture
def busy(desk):
    desk.submit(0, "a", "b", "c")
    desk.decide(60, a="n0:2", b="n1:2")
    return desk


def partial(desk, at, revision=None, reasons=None, **wanted):
    allocation = {job_id: place(text) for job_id, text in wanted.items()}
    decision = Decision(allocation, reasons=reasons or {})
    return desk(DecisionMade(at, desk.controller.revision if revision is None else revision, decision, partial=True))


def work(commands):
    return [command for command in commands if isinstance(command, StartJob | ResizeJob | StopJob)]


def test_who_is_not_named_keeps_what_it_holds(busy):
    assert work(partial(busy, 120, c="n0:1")) == [StartJob("c", 1, place("n0:1"))]
    assert work(partial(busy, 180, a="")) == [StopJob("a", 2, place("n0:2"), "preempted")]
    assert busy.controller.snapshot(180).running == {"b": place("n1:2"), "c": place("n0:1")}


def test_what_stays_is_counted_when_an_answer_is_checked(busy):
    with pytest.raises(BrokenDecision, match="node 'n0' has 4 GPUs and was given 5"):
        partial(busy, 120, c="n0:3")


def test_only_changes_are_kept(busy):
    reasons = {job_id: Reason("because") for job_id in "abc"}
    whole = Decision({"a": place("n0:2"), "c": place("n0:1")}, 3, reasons, memory=object())
    narrow = busy.controller.narrowed(whole)
    assert narrow.allocation == {"b": NOWHERE, "c": place("n0:1")}
    assert set(narrow.reasons) == {"b", "c"}
    assert (narrow.memory, narrow.desired_nodes) == (None, 3)


def test_a_narrowed_answer_does_what_the_whole_one_does(busy):
    twin = busy.fresh()
    for event in busy.events:
        twin(event)
    whole = Decision({"a": place("n0:4"), "c": place("n1:1")})
    revision = busy.controller.revision
    narrow = DecisionMade(120, revision, busy.controller.narrowed(whole), partial=True)
    assert busy(narrow) == twin(DecisionMade(120, revision, whole))


def test_who_waits_is_told_again_only_when_the_numbers_moved(busy):
    def told(free, *jobs, code="waits-for-gpus"):
        reasons = {"c": Reason(code, {"gpus": 4.0, "free_gpus": free}, jobs)}
        decision = Decision(busy.controller.snapshot(100).running, reasons=reasons)
        return dict(busy.controller.narrowed(decision).reasons)

    first = told(100.0, "a", "b")
    assert set(first) == {"c"}
    partial(busy, 120, reasons=first)
    record = busy.controller.jobs["c"]
    assert (record.reason, record.reason_at) == (first["c"], 120)
    assert told(100.0, "a", "b") == told(104.0, "a", "b") == told(100.0, "b", "x") == {}
    others = (told(106.0, "a", "b"), told(100.0, "x"), told(100.0), told(100.0, "a", "b", code="no-room"))
    assert [set(other) for other in others] == [{"c"}] * 4


def test_a_policy_that_invents_jobs_is_found_out(busy):
    whole = Decision({**busy.controller.snapshot(60).running, "ghost": place("n0:1")})
    narrow = busy.controller.narrowed(whole)
    with pytest.raises(BrokenDecision, match="ghost"):
        busy(DecisionMade(120, busy.controller.revision, narrow, partial=True))


def test_a_late_answer_counts_for_those_that_are_still_there(busy):
    asked = busy.controller.revision
    busy(JobCancelled(70, "b"))
    busy(JobPaused(71, "a"))
    assert work(partial(busy, 80, asked, a="n0:4", b="n1:4", c="n1:1")) == [StartJob("c", 1, place("n1:1"))]


def test_a_late_answer_that_does_not_fit_is_dropped_and_another_asked_for(busy):
    asked = busy.controller.revision
    busy(NodeRemoved(70, "n0"))
    assert work(partial(busy, 80, asked, c="n0:1")) == []
    assert busy.controller.next_decision_at == 80


def test_memory_is_kept_apart(busy):
    busy.controller.remember("plans")
    partial(busy, 120, c="n0:1")
    assert busy.controller.snapshot(130).memory == "plans"


def test_reasons_are_kept_with_their_time(busy):
    partial(busy, 120, reasons={"c": Reason("waits-for-gpus", {"gpus": 4.0}), "b": Reason("grew")}, a="n0:4")
    reasons = {job_id: (record.reason.code, record.reason_at) for job_id, record in busy.controller.jobs.items()}
    assert reasons == {"a": ("grew", 120), "b": ("started", 60), "c": ("waits-for-gpus", 120)}
    assert busy.controller.jobs["a"].reason.numbers == {"gpus_before": 2.0, "gpus_after": 4.0}


@pytest.mark.parametrize(("text", "code"), [("", "preempted"), ("n0:1", "shrank"), ("n0:3", "grew"), ("n1:2", "moved")])
def test_a_change_without_a_reason_is_told_by_its_numbers(busy, text, code):
    partial(busy, 120, a=text)
    assert busy.controller.jobs["a"].reason.code == code


def test_the_policys_own_reason_for_a_change_is_kept(busy):
    own = Reason("grew", {"gpus_before": 2.0, "gpus_after": 4.0, "fair_gpus": 3.0})
    partial(busy, 120, reasons={"a": own}, a="n0:4")
    assert busy.controller.jobs["a"].reason == own


def test_a_job_that_no_policy_is_shown_is_not_named(busy):
    whole = Decision({"a": place("n0:2"), "b": place("n1:2"), "c": place("n0:1")})
    busy(JobPaused(70, "c"))
    assert busy.controller.narrowed(whole).allocation == {}
