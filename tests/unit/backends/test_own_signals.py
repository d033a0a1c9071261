"""A replica that ends by a signal of its own has crashed; one that somebody killed is lost, and the others go on."""

import signal

import pytest

from pollux.backends.shim.actions import ReplicaChange, ReportLoss, Seat
from pollux.backends.shim.transition import settled_at

CRASHES = [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL]


@pytest.mark.parametrize("number", CRASHES)
def test_a_crash_is_judged_as_one_however_many_replicas_there_are(number):
    assert settled_at(1, (0, 1)).process_ended(1, -number, 0.0) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_who_was_killed_is_lost(number):
    (lost,) = [each for each in settled_at(1, (0, 1)).process_ended(1, -number, 0.0) if isinstance(each, ReportLoss)]
    assert (lost.ranks, lost.kept) == ((1,), (0,))


@pytest.mark.parametrize("number", CRASHES)
def test_what_follows_from_the_end_of_another_is_a_loss(number):
    machine = settled_at(1, (0, 1, 2))
    machine.process_ended(2, -signal.SIGKILL, 0.0)
    (lost,) = [each for each in machine.process_ended(1, -number, 0.1) if isinstance(each, ReportLoss)]
    assert lost.kept == (0,)


def test_so_is_what_happens_on_the_way_to_another_generation():
    machine = settled_at(1, (0, 1))
    machine.begin_change(ReplicaChange(2, (Seat(0, 0), Seat(1, 1))), 0.0)
    assert machine.phase == "move"
    assert [each for each in machine.process_ended(1, -signal.SIGABRT, 0.1) if isinstance(each, ReportLoss)]


def test_who_hung_and_was_ended_is_lost_whatever_the_signal():
    assert settled_at(1, (0, 1)).process_ended(1, -signal.SIGABRT, 0.0, hung="replica 1 hung") is not None
