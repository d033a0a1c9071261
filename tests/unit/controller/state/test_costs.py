"""What changes of its GPUs cost a job."""

from pollux.controller import JobReported, JobRunning
from pollux.controller.explanations.explain import explain, explain_cost
from pollux.controller.state.costs import Costs, likely_seconds, medians, with_pause
from pollux.controller.state.records import MOST_FAILED_MOVES
from pollux.core import Reason


def told(desk, at, seconds, kind, live=None):
    return desk(JobReported(at, "a", resize_cost_seconds=seconds, resize_kind=kind, live=live))


def started(desk):
    desk.submit(0, "a", resize_cost_seconds=5.0)
    desk.decide(60, a="n0:2")
    return desk.controller.jobs["a"]


def test_the_last_five_of_a_kind_count():
    costs: Costs = {}
    for seconds in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        costs = with_pause(costs, "grow", seconds)
    assert costs == {"grow": (1.0, 2.0, 3.0, 4.0, 5.0)}
    assert medians({**costs, "move": ()}) == {"grow": 3.0}


def test_the_likely_cost_is_that_of_the_way_it_will_go():
    costs = {"grow": (0.3,), "shrink": (0.1,), "recover": (9.0,), "restart": (6.0, 8.0)}
    assert likely_seconds(costs, True, 5.0) == 0.3
    assert likely_seconds(costs, False, 5.0) == 7.0
    assert likely_seconds({"recover": (2.0,)}, True, 5.0) == 2.0
    assert likely_seconds({"restart": (6.0,)}, True, 5.0) == likely_seconds({}, False, 5.0) == 5.0


def test_a_jobs_own_cost_reaches_policies(desk):
    record = started(desk)
    told(desk, 70, 0.4, "grow", live=True)
    assert desk.controller.snapshot(80).jobs[0].resize_cost_seconds == 0.4
    told(desk, 71, 7.0, "restart", live=False)
    assert desk.controller.snapshot(80).jobs[0].resize_cost_seconds == 7.0
    assert (record.likely_kind, record.costs) == ("restart", {"grow": (0.4,), "restart": (7.0,)})


def test_a_pause_that_is_told_again_counts_once(desk):
    record = started(desk)
    for at in (70, 71, 72):
        told(desk, at, 0.4, "grow")
    assert record.costs == {"grow": (0.4,)}


def test_what_the_backend_measured_counts_and_a_report_of_the_same_does_not(desk):
    record = started(desk)
    desk(JobRunning(65, "a", 1, 0.2, "shrink"))
    told(desk, 70, 0.2, "shrink")
    assert record.costs == {"shrink": (0.2,)}
    desk(JobRunning(71, "a", 1, 9.0, "shrink"))
    assert record.costs == {"shrink": (0.2,)}, "an echo"


def test_the_pause_of_a_start_counts_once_for_its_generation(desk):
    """However often, and with whatever length, it is told; the same length again in another generation is another."""
    record = started(desk)

    def of(generation, seconds):
        return JobReported(70 + generation, "a", None, None, seconds, resize_kind="restart", generation=generation)

    desk(of(1, 6.0))
    assert not desk.controller.is_news(of(1, 6.5))
    desk(of(1, 6.5))
    assert record.costs == {"restart": (6.0,)}
    assert desk.controller.is_news(of(2, 6.0))
    desk(of(2, 6.0))
    assert record.costs == {"restart": (6.0, 6.0)}


def test_a_pause_known_from_an_older_log_is_no_news(desk):
    record = started(desk)
    told(desk, 70, 6.0, "restart")
    desk(JobReported(71, "a", resize_cost_seconds=6.0, resize_kind="restart", generation=1))
    assert (record.costs, record.paused_generation) == ({"restart": (6.0,)}, 1)


def test_pauses_and_abilities_are_news_once(desk):
    started(desk)
    first = JobReported(70, "a", resize_cost_seconds=0.4, resize_kind="grow", live=True)
    assert desk.controller.is_news(first)
    desk(first)
    assert not desk.controller.is_news(first)
    assert desk.controller.is_news(JobReported(71, "a", live=False))
    assert desk.controller.is_news(JobReported(71, "a", resize_cost_seconds=0.4, resize_kind="shrink"))


def test_a_cost_without_a_kind_is_that_of_any_change(desk):
    record = started(desk)
    told(desk, 70, 12.0, "")
    assert (record.resize_cost_seconds, record.costs) == (12.0, {})


def test_a_change_that_came_about_forgives_those_that_did_not(desk):
    record = started(desk)
    record.live, record.failed_moves = True, MOST_FAILED_MOVES
    assert not record.moves_live
    told(desk, 70, 6.0, "restart")
    assert not record.moves_live
    told(desk, 71, 0.2, "shrink")
    assert record.moves_live


def test_people_are_told_what_a_change_would_cost_now_apart_from_the_past_decision(desk):
    record = started(desk)
    reason = Reason("started", {"gpus_after": 2.0})
    before = explain(reason, record)
    assert explain_cost(record) == ""
    told(desk, 70, 0.42, "grow", live=True)
    assert explain_cost(record) == ("as of now, a change of its GPUs costs it about 0.42 s, live")
    told(desk, 71, 6.0, "restart", live=False)
    assert explain_cost(record) == "as of now, a change of its GPUs costs it about 6 s, with a restart"
    assert explain(reason, record) == before


def test_changes_that_became_restarts_make_the_next_one_dearer():
    costs = {"grow": (1.0,), "restart": (10.0,)}
    assert [likely_seconds(costs, True, 5.0, failed) for failed in (0.0, 1 / 3, 1.0)] == [1.0, 4.0, 10.0]
    assert likely_seconds({"grow": (1.0,)}, True, 5.0, 1.0) == 1.0, "no restart was measured"
    assert likely_seconds({"grow": (9.0,), "restart": (2.0,)}, True, 5.0, 1.0) == 9.0
