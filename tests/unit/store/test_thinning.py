"""Which measurements stay: the same whether a series is thinned once or again and again."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.store._thinning import evenly, rows_to_keep

ascending = st.lists(st.floats(0.0, 1e6), max_size=300).map(sorted)


def thinned(times: list[float]) -> list[float]:
    return [times[index] for index in rows_to_keep(times)]


@given(ascending)
def test_the_newest_stays_and_order_too(times):
    left = rows_to_keep(times)
    assert left == sorted(set(left))
    assert left[-1:] == ([len(times) - 1] if times else [])


@given(ascending)
def test_thinning_twice_changes_nothing(times):
    once = thinned(times)
    assert thinned(once) == once


def test_thinning_as_it_grows_comes_out_as_thinning_at_the_end():
    whole = [7.0 * number for number in range(30_000)]
    growing: list[float] = []
    for start in range(0, len(whole), 64):
        growing = thinned(growing + whole[start : start + 64])
    # Where two ages meet, an interval is cut in two, at another place each time.
    assert len(set(thinned(whole)) - set(growing)) <= 3
    assert len(growing) <= len(thinned(whole)) + 64


def test_each_age_has_its_distance():
    times = [float(number) for number in range(3 * 86_400)]
    left = thinned(times)
    gaps = {
        "hour": [late - early for early, late in pairwise(left[:-1]) if early > times[-1] - 3500],
        "day": [late - early for early, late in pairwise(left) if times[-1] - 86_000 < early < times[-1] - 4000],
        "older": [late - early for early, late in pairwise(left) if early < times[-1] - 90_100],
    }
    assert {name: set(found) for name, found in gaps.items()} == {"hour": {30.0}, "day": {300.0}, "older": {3600.0}}


@pytest.mark.parametrize("most", [1, 2, 3, 10, 1999])
def test_there_is_a_most(most):
    left = rows_to_keep([3600.0 * number for number in range(9000)], most)
    assert len(left) <= most
    assert left[-1] == 8999


@given(st.integers(0, 500), st.integers(0, 600))
def test_evenly(count, limit):
    chosen = evenly(count, limit)
    assert len(chosen) == min(count, limit)
    assert chosen == sorted(set(chosen))
    if chosen:
        assert chosen[-1] == count - 1
        assert limit == 1 or chosen[0] == 0
