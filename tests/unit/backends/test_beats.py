"""Who counts as hung."""

from pollux.backends._beats import Beats


def beat(step, busy=""):
    return {"step": step, "at": 0.0, "busy": busy}


def stepping(hang_seconds=30.0):
    beats = Beats(hang_seconds)
    beats.heard(0, beat(0), 0.0)
    beats.heard(0, beat(1), 1.0)
    return beats


def test_silence_after_steps_is_a_hang():
    beats = stepping()
    assert beats.due == 31.0
    assert beats.silent(30.9) == []
    assert beats.silent(31.0) == [0]
    assert beats.silent(99.0) == []


def test_nobody_hangs_before_the_first_step():
    beats = Beats(1.0)
    beats.heard(0, beat(-1), 0.0)
    assert (beats.due, beats.silent(100.0)) == (None, [])


def test_who_announces_something_long_has_ten_times_as_long_to_say_so_again():
    beats = stepping()
    beats.heard(0, beat(1, "checkpoint"), 2.0)
    assert (beats.due, beats.silent(301.0)) == (302.0, [])
    beats.heard(0, beat(1, "checkpoint"), 301.0)
    beats.heard(0, beat(2), 600.0)
    assert beats.silent(630.0) == [0]


def test_who_goes_to_another_generation_may_wait_for_the_others_besides():
    beats = Beats(3.0, regroup_seconds=5.0)
    beats.heard(0, beat(1, "regroup"), 2.0)
    assert beats.due == 10.0


def test_one_beat_after_a_step_is_enough_to_be_missed_later():
    beats = Beats(30.0)
    beats.heard(0, beat(4), 1.0)
    assert beats.due == 31.0


def test_in_a_new_generation_everybody_has_stepped():
    beats = stepping()
    beats.heard(1, beat(0), 1.0)
    beats.settle([0, 2], 5.0)
    assert beats.steps() == {0: 1, 2: 0}
    assert beats.silent(35.0) == [0, 2]


def test_a_script_that_goes_on_after_its_job_is_never_hung():
    beats = stepping()
    assert not beats.is_finished()
    beats.heard(0, beat(9, "finished"), 2.0)
    assert beats.is_finished()
    assert beats.due is None


def test_a_number_that_is_given_anew_is_no_false_alarm():
    beats = stepping()
    beats.silent(31.0)
    beats.renew(0)
    beats.heard(0, beat(2), 40.0)
    assert (beats.false_alarms, beats.due) == (0, 70.0)


def test_a_beat_after_the_sentence_is_a_false_alarm():
    beats = stepping()
    beats.silent(31.0)
    beats.heard(0, beat(2), 31.1)
    assert beats.false_alarms == 1
    assert beats.due is None
