"""Waiting for something: what is found, and what is said where it does not come."""

import pytest

from pollux.testing.waiting import OutOfTime, wait_until


def test_what_is_found_is_returned():
    left = [[], [], [3]]
    assert wait_until("number", lambda: left.pop(0), pause_seconds=0.0) == [3]


def test_it_is_looked_at_once_even_without_time():
    assert wait_until("number", lambda: 7, 0.0) == 7


def test_what_does_not_come_is_told_with_its_story():
    with pytest.raises(OutOfTime, match=r"^no number after 0 s\nthere were none$"):
        wait_until("number", lambda: 0, 0.0, 0.0, lambda: "there were none")
    assert issubclass(OutOfTime, AssertionError), "those who wait in vain on purpose catch that"
