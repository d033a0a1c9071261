"""Work that goes on whatever a step of it does."""

from pollux.backends.dispatch.failure_backoff import FailureBackoff


def fail():
    raise KeyError("a mistake")


def test_one_mistake_holds_nothing_up_and_does_not_count_for_long(caplog):
    stumbles, done = FailureBackoff(), []

    def turn():
        stumbles.step(fail)
        stumbles.step(lambda: done.append("the next"))

    assert stumbles.turn(turn) > 0.0
    assert done == ["the next"]
    assert stumbles.is_healthy
    assert "a mistake" in caplog.text
    assert stumbles.turn(lambda: None) == 0.0


def test_mistakes_turn_after_turn_are_too_many_until_one_goes_well(caplog):
    stumbles = FailureBackoff()
    pauses = [stumbles.turn(fail) for _ in range(20)]
    assert not stumbles.is_healthy
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] <= 5.0
    assert caplog.text.count("Traceback") == 3, "a log that is not flooded"
    stumbles.turn(lambda: None)
    assert stumbles.is_healthy
