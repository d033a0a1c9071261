"""Full collections look at what is new, and once an hour at everything."""

from __future__ import annotations

import gc
import weakref

import pytest

from pollux.service.server.short_collections import short_collections


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def by_hand():
    """No collection but those of the test."""
    was = gc.isenabled()
    gc.disable()
    yield
    if was:
        gc.enable()


def test_what_survives_one_full_collection_is_not_looked_at_by_the_next(by_hand):
    now = [0.0]
    with short_collections(clock=lambda: now[0]):
        lives = Cycle()
        seen = weakref.ref(lives)
        gc.collect()
        assert gc.get_freeze_count() > 0
        del lives
        gc.collect()
        assert seen() is not None
        now[0] = 3601.0
        gc.collect()
        assert seen() is None


def test_what_is_new_is_collected_at_once(by_hand):
    with short_collections():
        gc.collect()
        lives = Cycle()
        seen = weakref.ref(lives)
        del lives
        gc.collect()
        assert seen() is None


def test_afterwards_everything_is_as_before(by_hand):
    before = list(gc.callbacks)
    with short_collections():
        gc.collect()
    assert gc.callbacks == before
    assert gc.get_freeze_count() == 0


def test_small_collections_freeze_nothing(by_hand):
    with short_collections():
        gc.collect(0)
        gc.collect(1)
        assert gc.get_freeze_count() == 0
