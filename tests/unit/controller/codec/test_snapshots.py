"""Saved and restored: everything is there, as plain values, and damage is told apart from another version."""

import json

import pytest

from pollux.controller import (
    Controller,
    ControllerSettings,
    DecisionMade,
    GenerationEnded,
    JobFinished,
    JobPaused,
    JobRecord,
    JobReported,
    JobSpec,
    JobSubmitted,
    QueueChanged,
    TimerFired,
)
from pollux.core import Decision, InvalidInput, JobLimits, Queue
from pollux.core.errors import StoreFailed
from pollux.testing import SaturatingGoodput, goodput_model
from pollux.wire.job import JobRequest


@pytest.fixture
def lived(make_desk):
    desk = make_desk(trigger="events", queues=(Queue("q", 2.0, 6),))
    request = JobRequest("a", ("python", "train.py"), 1, 4, env={"SEED": "1"})
    desk(JobSubmitted(0, JobSpec("a", JobLimits(max_gpus=4), 2, 4.0, "q", request=request, time_limit_seconds=500.0)))
    desk.submit(1, "b", "c", "d", retries=3)
    desk.submit(2, "e", after=("b", "c"))
    desk.decide(10, a="n0:2", b="n0:1 n1:1", d="n1:1")
    desk(JobReported(20, "a", goodput_model(), 1e6, 12.5, 64))
    desk(GenerationEnded(30, "b", 1, "crashed", "exit 1"))
    desk(JobPaused(31, "c"))
    desk(JobFinished(32, "d"))
    desk(QueueChanged(33, Queue("r", gpu_quota=1)))
    return desk


def saved(controller):
    return json.loads(json.dumps(controller.state(), allow_nan=False))


def test_everything_comes_back(lived):
    again = Controller.restored(saved(lived.controller), lived.controller.settings)
    assert again.jobs == lived.controller.jobs
    assert list(again.active) == list(lived.controller.active) == ["a", "b", "c", "e"]
    assert (again.cluster, again.queues) == (lived.controller.cluster, lived.controller.queues)
    for name in ("revision", "next_decision_at", "next_timer_at"):
        assert getattr(again, name) == getattr(lived.controller, name), name
    assert again.snapshot(50) == lived.controller.snapshot(50)
    assert again.jobs["a"].goodput == lived.controller.jobs["a"].goodput
    assert again.jobs["a"].spec.request == lived.controller.jobs["a"].spec.request


def test_a_state_that_is_made_later_is_that_of_its_moment(lived):
    later, now = lived.controller.state_later(), saved(lived.controller)
    lived.submit(40, "f")
    lived(JobReported(41, "a", goodput_model(noise_scale=5000.0), 5e5, 20.0, 128))
    lived(JobFinished(42, "a"))
    lived(QueueChanged(43, Queue("s")))
    assert json.loads(json.dumps(later())) == now != saved(lived.controller)


def test_it_goes_on_in_the_same_way(lived):
    again = Controller.restored(saved(lived.controller), lived.controller.settings)
    for event in (TimerFired(32.0), TimerFired(510.0), GenerationEnded(511.0, "a", 1, "succeeded")):
        assert again.apply(event) == lived.controller.apply(event)
    assert saved(again) == saved(lived.controller)


def test_a_controller_that_never_decided_can_be_saved(desk):
    again = Controller.restored(saved(desk.controller))
    assert (again.revision, again.settings) == (0, ControllerSettings())


def test_a_saved_state_is_what_it_was_when_saved(lived):
    before = lived.controller.state()
    text = json.dumps(before)
    lived(JobReported(60, "a", goodput_model(noise_scale=10.0), 5.0))
    lived.decide(70, a="n0:4")
    assert json.dumps(before) == text


def test_a_model_of_somebody_else_cannot_be_saved(lived):
    lived(JobReported(60, "a", SaturatingGoodput()))
    with pytest.raises(InvalidInput, match="SaturatingGoodput"):
        lived.controller.state()


def test_another_format_is_refused_with_a_way_out(lived):
    with pytest.raises(StoreFailed, match=r"format 99.*replay the whole log"):
        Controller.restored({**saved(lived.controller), "format": 99})


def test_damage_is_told(lived):
    state = saved(lived.controller)
    del state["jobs"][0]["placement"]
    with pytest.raises(StoreFailed, match=r"damaged.*placement"):
        Controller.restored(state)


def test_no_field_of_a_record_is_forgotten(lived):
    derived = {"seen", "written"}
    assert set(saved(lived.controller)["jobs"][0]) == set(JobRecord.__dataclass_fields__) - derived


def test_a_change_during_a_decision_is_not_forgotten(lived):
    asked = lived.controller.revision
    lived.submit(40, "late")
    again = Controller.restored(saved(lived.controller), lived.controller.settings)
    answer = DecisionMade(41, asked, lived.controller.narrowed(Decision({})), partial=True)
    assert again.apply(answer) == lived.controller.apply(answer)
    assert again.next_decision_at == lived.controller.next_decision_at == 43
