"""How much notice a job needs before its node goes, and how often it saves where it gets less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.core.notice import AHEAD_SHARE, FIRST_SECONDS, LEAST_SECONDS, ahead_seconds, needed_seconds

SECONDS = st.floats(0.0, 1e6)


def test_without_a_measurement_there_is_a_rule_of_thumb():
    assert needed_seconds(None) == LEAST_SECONDS
    assert needed_seconds(0.0) < LEAST_SECONDS < needed_seconds(60.0)


@pytest.mark.parametrize("notice", [0.0, 5.0, 600.0])
def test_the_first_checkpoint_comes_soon_where_nodes_are_taken_back(notice):
    assert ahead_seconds(notice, None) == FIRST_SECONDS
    assert ahead_seconds(None, None) is None


@given(SECONDS, SECONDS, SECONDS)
def test_saving_ahead_is_for_who_needs_more_than_the_notice_and_costs_a_bounded_share(notice, checkpoint, pause):
    every = ahead_seconds(notice, checkpoint, pause)
    assert (every is None) == (needed_seconds(checkpoint) <= notice)
    if every is not None:
        assert pause <= AHEAD_SHARE * every * (1 + 1e-9)
        assert every > checkpoint, "one is whole before the next begins"


@given(SECONDS, SECONDS)
def test_what_takes_longer_needs_more(one, two):
    assert (needed_seconds(one) <= needed_seconds(two)) == (one <= two) or one == pytest.approx(two)
