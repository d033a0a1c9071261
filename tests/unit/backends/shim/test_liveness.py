"""Who counts as hung."""

import pytest

from pollux.backends.shim.liveness import ListeningClock, LivenessTracker
from pollux.wire.live.heartbeat import Activity, Heartbeat


def beat(step, busy="", busy_seconds=0.0, waiting=False):
    return Heartbeat(step, 0.0, Activity(busy), busy_seconds, waiting)


def stepping(hang_seconds=30.0, other_until=600):
    """Replica 0 was heard last at 1 s, replica 9 at any time up to then."""
    beats = LivenessTracker(hang_seconds)
    beats.note_beat(0, beat(0), 0.0)
    beats.note_beat(0, beat(1), 1.0)
    beats.note_beat(9, beat(1, waiting=True), float(other_until))
    return beats


def test_silence_after_steps_is_a_hang():
    beats = stepping()
    assert beats.due == 31.0
    assert beats.silent(30.9) == []
    assert beats.silent(31.0) == [0]
    assert beats.words == {0: "no heartbeat for 30 s"}
    assert beats.silent(99.0) == []


def test_who_is_the_only_one_has_ten_times_as_long():
    beats = LivenessTracker(30.0)
    beats.note_beat(0, beat(1), 1.0)
    assert beats.due == 301.0
    assert beats.silent(301.0) == [0]


def test_of_those_that_fell_silent_together_none_is_ended_for_long_and_then_one():
    beats = LivenessTracker(30.0)
    for number, at in ((0, 2.0), (1, 1.0), (2, 3.0)):
        beats.note_beat(number, beat(5), at)
    assert beats.silent(300.9) == []
    assert beats.silent(303.5) == [1], "the first to fall silent"
    assert beats.silent(304.0) == [], "the others may be free now, and have time to say so"
    assert beats.silent(604.0) == [0]
    assert beats.due == 904.0, "the last one"


def test_who_fell_silent_clearly_before_the_others_is_ended_first_and_alone():
    beats = LivenessTracker(30.0)
    beats.note_beat(0, beat(5), 1.0)
    beats.note_beat(1, beat(5), 9.0)
    beats.note_beat(2, beat(5), 10.0)
    assert beats.silent(31.0) == [0]
    assert beats.silent(100.0) == []


def test_who_joins_says_nothing_about_those_that_hold_the_state():
    beats = LivenessTracker(30.0)
    beats.note_beat(0, beat(5), 1.0)
    beats.note_beat(1, beat(5), 1.0)
    beats.note_beat(2, beat(-1, "first step"), 30.0)
    assert beats.silent(200.0) == []


def test_who_waits_for_data_is_let_unless_others_have_waited_for_it_for_long():
    beats = LivenessTracker(30.0)
    beats.note_beat(0, beat(5, "data", 290.0), 400.0)
    beats.note_beat(1, beat(5, "data", 900.0), 400.0)
    assert beats.due == 700.0
    beats.note_beat(1, beat(5, waiting=True), 400.0)
    assert beats.silent(409.9) == []
    assert beats.silent(410.0) == [0]
    assert beats.words[0] == "no data came for 300 s, and others wait for it"


def test_a_clock_that_stood_still_counts_nothing():
    now = [100.0]
    clock = ListeningClock(lambda: now[0])
    assert clock() == 0.0
    now[0] += 1.5
    assert clock() == 1.5
    now[0] += 3600.0
    assert clock() == 3.5, "no more than a gap between two looks may be"
    assert clock.at(3.7) == now[0] + (3.7 - 3.5)
    assert clock.at(99.0) == now[0] + 1.0, "it must look in between"


def test_who_has_ended_is_not_missed():
    beats = stepping()
    beats.drop(0)
    assert beats.silent(100.0) == []


def test_nobody_hangs_before_the_first_step():
    beats = LivenessTracker(1.0)
    beats.note_beat(0, beat(-1), 0.0)
    assert (beats.due, beats.silent(100.0)) == (None, [])


def test_who_never_spoke_is_missed_once_another_has_stepped():
    beats = LivenessTracker(30.0, unheard={0, 1, 2})
    beats.note_beat(0, beat(-1, "first step"), 1.0)
    assert beats.silent(200.0) == [], "a first step may take long, and nobody is held up as yet"
    beats.note_beat(0, beat(4), 200.0)
    beats.note_beat(1, beat(4), 200.5)
    for at in range(201, 230):
        beats.note_beat(0, beat(4, waiting=True), float(at))
        beats.note_beat(1, beat(4, waiting=True), float(at))
    assert beats.silent(229.9) == []
    assert beats.silent(230.0) == [2]
    assert beats.words[2] == "no heartbeat for 30 s"


@pytest.mark.parametrize("way", ["drop", "renew", "keep"])
def test_who_is_gone_before_it_spoke_is_not_missed(way):
    beats = LivenessTracker(30.0, unheard={0, 1})
    beats.keep([0]) if way == "keep" else getattr(beats, way)(1)
    beats.note_beat(0, beat(4), 0.0)
    assert beats.steps() == {0: 4}


def test_who_announces_something_long_has_ten_times_as_long_to_say_so_again():
    beats = stepping(other_until=900)
    beats.note_beat(0, beat(1, "checkpoint"), 2.0)
    assert (beats.due, beats.silent(301.0)) == (302.0, [])
    beats.note_beat(0, beat(1, "checkpoint"), 301.0)
    beats.note_beat(0, beat(2), 600.0)
    assert beats.silent(630.0) == [0]


def test_who_goes_to_another_generation_may_wait_for_the_others_besides():
    beats = LivenessTracker(3.0, regroup_seconds=5.0)
    beats.note_beat(0, beat(1, "regroup"), 2.0)
    beats.note_beat(1, beat(1, "regroup"), 9.0)
    assert beats.due == 10.0


def test_one_beat_after_a_step_is_enough_to_be_missed_later():
    beats = LivenessTracker(30.0)
    beats.note_beat(0, beat(4), 1.0)
    beats.note_beat(1, beat(4), 20.0)
    assert beats.due == 31.0


def test_in_a_new_generation_everybody_has_stepped():
    beats = stepping()
    beats.note_beat(1, beat(0), 1.0)
    beats.settle([0, 2], 5.0)
    assert beats.steps() == {0: 1, 2: 0}
    beats.note_beat(2, beat(1), 30.0)
    assert beats.silent(35.0) == [0]


def test_a_script_that_goes_on_after_its_job_is_never_hung():
    beats = stepping()
    assert not beats.is_finished()
    for number in (0, 9):
        beats.note_beat(number, beat(9, "finished"), 2.0)
    assert beats.is_finished()
    assert beats.due is None


def test_a_number_that_is_given_anew_is_no_false_alarm():
    beats = stepping()
    beats.silent(31.0)
    beats.renew(0)
    beats.note_beat(0, beat(2), 40.0)
    assert (beats.false_alarms, beats.due) == (0, 70.0)
    assert beats.silent(31.0) == []


def test_a_beat_after_the_sentence_is_a_false_alarm():
    beats = stepping()
    beats.silent(31.0)
    beats.note_beat(0, beat(2), 31.1)
    assert beats.false_alarms == 1
    assert 0 not in beats.steps()
