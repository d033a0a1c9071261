"""Numbers as people read them."""

import time

import pytest

from pollux.cli.display.number_format import clock, compact, duration, eta_range, moment, share, since


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (59.4, "59s"), (59.6, "1min"), (600, "10min"), (3599, "59min"), (3600, "1h"),
     (4800, "1h 20min"), (36_000 + 1200, "10h"), (86_400, "1d"), (183_600, "2d 3h"), (86_400 * 40, "40d")],
)  # fmt: skip
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.423, "0.42"), (7, "7"), (87.14, "87.1"), (123.4, "123"), (1240, "1,240"),
     (9_999.4, "9,999"), (38_250, "38k"), (12_345_678, "12M")],
)  # fmt: skip
def test_compact(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0, "0%"), (0.999, "99%"), (1.0, "100%"), (1.2, "100%")])
def test_share_is_not_complete_before_it_is(value, text):
    assert share(value) == text


def test_moments():
    now = time.mktime((2026, 5, 4, 14, 30, 0, 0, 0, -1))
    assert clock(now - 90, now) == "14:28:30"
    assert clock(now - 86_400, now) == "May 03 14:30"
    assert since(now - 90, now) == "1min ago"
    assert since(now + 90, now) == "in 1min"
    assert moment(None, now) == "–"
    assert moment(now - 90, now) == "14:28:30 (1min ago)"


def test_eta():
    assert eta_range({}, 0.0) == "–"
    assert eta_range({"eta": {"low": 160.0, "high": 161.0}}, 100.0) == "1min"
    assert eta_range({"eta": {"low": 40.0, "high": 3700.0}}, 100.0) == "0s–1h"
