"""How often replicas meet and steps are measured."""

import math

import pytest

from pollux.agent.adaptation.round_pace import RoundPace


def after_the_burst(adapts: bool = True) -> RoundPace:
    pace = RoundPace(adapts)
    pace.rounds_since_change = 100
    return pace


def test_measuring_goes_on_longer_where_the_noise_is_not_clear():
    pace = after_the_burst()
    pace.set_measuring(0.1, 0.02, 150, is_clear=False)
    assert pace.measures_every == 2
    pace.set_measuring(0.1, 0.02, 150, is_clear=True)
    assert pace.measures_every == 4
    exact = after_the_burst(adapts=False)
    exact.set_measuring(0.1, 0.02, 150, is_clear=False)
    assert exact.measures_every == 4, "nothing waits for it"


def test_measuring_keeps_to_its_budget():
    pace = after_the_burst()
    pace.set_measuring(0.1, 0.31, 1000, is_clear=True)
    assert 0.31 / pace.measures_every <= 0.005, "also where a measured step costs a third more than others"
    pace.set_measuring(0.1, 5.0, 1000, is_clear=True)
    assert pace.measures_every == 64
    pace.set_measuring(0.001, 5.0, 1000, is_clear=True)
    assert pace.measures_every == 8, "short steps are measured more often than they should for what it costs"


def test_an_unknown_cost_changes_nothing_but_the_limits():
    pace = after_the_burst()
    pace.set_measuring(0.1, 0.1, 1000, is_clear=True)
    assert pace.measures_every == 20
    pace.set_measuring(0.1, math.nan, 1000, is_clear=True)
    assert pace.measures_every == 20
    pace.rounds_since_change = 0
    pace.set_measuring(0.1, math.nan, 1000, is_clear=True)
    assert pace.measures_every == 4, "after a change steps are measured in a burst"


@pytest.mark.parametrize(
    ("adapts", "seconds", "steps"),
    [(True, 1.0, 10), (True, 0.07, 15), (True, 0.001, 20), (False, 1.0, 20), (False, 0.05, 100), (False, 0.001, 200)],
)
def test_a_round_lasts_about_so_many_seconds(adapts, seconds, steps):
    pace = RoundPace(adapts)
    assert pace.is_round(10)
    assert not pace.is_round(9)
    pace.end_round(10, seconds)
    assert pace.is_round(10 + steps)
    assert not pace.is_round(9 + steps)


def test_without_a_time_rounds_stay_as_long_as_they_were():
    pace = RoundPace(True)
    pace.end_round(10, 0.07)
    pace.end_round(25, math.nan)
    assert pace.is_round(40)
    assert not pace.is_round(39)


def test_among_other_replicas_rounds_start_short_again():
    pace = RoundPace(True)
    pace.end_round(10, 0.07)
    pace.start_again()
    pace.schedule_round(12)
    assert pace.is_round(22)
    assert pace.rounds_since_change == 0
