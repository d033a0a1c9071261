"""Machines whose clocks are apart: a moment that replicas are told is by the clock of their own node."""

import pytest

from pollux.backends.node_daemon import job_runner
from pollux.backends.node_daemon.job_runner import _by_own_clock

SERVICE = 1_800_000_000.0


@pytest.mark.parametrize("apart", [0.0, 3 * 3600.0, -5 * 3600.0])
def test_a_pause_is_as_long_on_a_node_whose_clock_is_hours_off(monkeypatch, apart):
    node = SERVICE + apart
    monkeypatch.setattr(job_runner.time, "time", lambda: node)
    told = _by_own_clock({"POLLUX_STOPPED_AT": repr(SERVICE - 4.0), "A": "1"}, SERVICE)
    assert node - float(told["POLLUX_STOPPED_AT"]) == pytest.approx(4.0)
    assert told["A"] == "1"


@pytest.mark.parametrize("environ", [{}, {"POLLUX_STOPPED_AT": "once upon a time"}])
def test_what_is_no_moment_stays_as_it_is(environ):
    assert _by_own_clock(environ, SERVICE) == environ
