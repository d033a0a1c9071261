"""Who holds the folder of checkpoints: one replica at a time, and none that is not wanted."""

import threading
from typing import Any

import pytest

from pollux.agent.checkpoint.handover import FolderHold
from pollux.agent.checkpoint.lease import Holder
from pollux.core.errors import MisusedJob
from pollux.testing.waiting import PATIENCE_SECONDS


@pytest.fixture
def hold(tmp_path):
    holds: list[FolderHold] = []

    def make(wanted: bool = True) -> FolderHold:
        holds.append(FolderHold(tmp_path, None, Holder(), wanted))
        return holds[-1]

    yield make
    for each in holds:
        each.close()


def test_the_next_one_takes_hold_as_soon_as_the_first_lets_go(hold):
    first, second = hold(), hold()
    first.open()
    with pytest.raises(MisusedJob, match="in use"):
        second.open()
    taking = threading.Thread(target=second.acquire)
    taking.start()
    first.release()
    taking.join(PATIENCE_SECONDS)
    assert first.folder is None
    assert second.folder is not None


@pytest.mark.parametrize("end", ["not wanted", "closed"])
def test_who_is_not_wanted_takes_nothing(hold, end):
    one = hold(wanted=end != "not wanted")
    if end == "closed":
        one.close()
        one.wanted = True
    assert not one.wanted
    one.acquire()
    assert one.folder is None


def test_a_hold_that_comes_too_late_is_let_go(hold, monkeypatch):
    one: Any = hold()
    opened, go_on = threading.Event(), threading.Event()
    real = one.open

    def late() -> None:
        opened.set()
        assert go_on.wait(PATIENCE_SECONDS)
        real()

    monkeypatch.setattr(one, "open", late)
    one.acquire_in_background()
    assert opened.wait(PATIENCE_SECONDS)
    one.wanted = False
    go_on.set()
    one._acquiring.join(PATIENCE_SECONDS)
    assert one.folder is None
    hold().open()
