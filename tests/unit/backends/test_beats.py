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


def test_nobody_hangs_while_something_long_is_announced():
    beats = stepping()
    beats.heard(0, beat(1, "checkpoint"), 2.0)
    assert (beats.due, beats.silent(1000.0)) == (None, [])
    beats.heard(0, beat(2), 1000.0)
    assert beats.silent(1030.0) == [0]


def test_a_new_generation_has_a_first_step_of_its_own():
    beats = stepping()
    beats.heard(1, beat(0), 1.0)
    beats.keep([0])
    assert beats.due is None
    beats.heard(0, beat(5), 2.0)
    assert beats.due == 32.0


def test_a_beat_after_the_sentence_is_a_false_alarm():
    beats = stepping()
    beats.silent(31.0)
    beats.heard(0, beat(2), 31.1)
    assert beats.false_alarms == 1
    assert beats.due is None
