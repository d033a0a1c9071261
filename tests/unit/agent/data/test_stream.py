"""Streams: one order for everybody, and the way back to a place in it."""

import logging
import multiprocessing
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from pollux.agent.data import stream as stream_module
from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.random_numbers import RandomState, seed_random
from pollux.agent.data.stream import Stream, WorkerStart
from pollux.agent.data.stream_position import StreamPosition


class Shards(IterableDataset[Any]):
    """Worker s of n gives the lists number s, s + n, ...; draws from the generators from item `noisy_from` on."""

    def __init__(self, *lists, noisy_from=None):
        self.lists = lists
        self.noisy_from = noisy_from
        self.epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        assert info is None or info.dataset is self
        place = 0
        for part in self.lists[first::step]:
            for item in part:
                is_noisy = self.noisy_from is not None and place >= self.noisy_from
                yield (item, torch.rand(()).item(), random.random(), np.random.rand()) if is_noisy else item
                place += 1


class Counted(IterableDataset[Any]):
    """A stream that can seek, and counts what it reads."""

    def __init__(self, size=10):
        self.size = size
        self.first = 0
        self.read = 0

    def __iter__(self):
        for place in range(self.first, self.size):
            self.place = place
            self.read += 1
            yield place
        self.first = 0

    def state_dict(self):
        return {"first": self.place + 1}

    def load_state_dict(self, state):
        self.first = state["first"]


def make(dataset, shards=1, in_workers=False, seed=0):
    return Stream(dataset, seed, shards, in_workers, {"worker_init_fn": WorkerStart(dataset, None)})


def opened(dataset, shards=1, position=None, pass_index=0, **options):
    stream = make(dataset, shards, **options)
    stream.open(pass_index, position or stream.origin())
    return stream


def all_of(stream, count=4):
    found = []
    while not stream.is_empty():
        found += stream.read_items(count).items
    return found


def by_hand(lists):
    """The order as the docstring says it: in turn from shards that have any left."""
    found = []
    for place in range(max(map(len, lists))):
        found += [(place * len(lists) + shard, part[place]) for shard, part in enumerate(lists) if place < len(part)]
    return found


LISTS = st.lists(st.lists(st.integers(), max_size=6), min_size=1, max_size=4).filter(any)


@given(lists=LISTS, taken=st.integers(0, 24))
def test_shards_take_turns_and_any_place_is_found_again(lists, taken):
    expected = by_hand(lists)
    stream = opened(Shards(*lists), len(lists))
    assert all_of(stream) == expected
    numbers = np.array([number for number, _ in expected[:taken]], dtype=np.int64)
    position = stream.origin().advanced(numbers, None)
    assert sum(position.shards) == len(numbers)
    assert position.ledger() == SampleLedger.of(numbers)
    assert all_of(opened(Shards(*lists), len(lists), position)) == expected[taken:]


@pytest.mark.parametrize("taken", [0, 3, 6])
def test_workers_give_the_same_as_reading_here(taken):
    lists = ([10, 11, 12, 13, 14], [20, 21])
    expected = by_hand(lists)
    before = set(multiprocessing.active_children())
    position = StreamPosition((0, 0)).advanced(
        np.array([number for number, _ in expected[:taken]], dtype=np.int64), None
    )
    stream = opened(Shards(*lists), 2, position, in_workers=True)
    assert set(multiprocessing.active_children()) > before
    assert all_of(stream) == expected[taken:]
    assert set(multiprocessing.active_children()) == before


def test_closing_ends_the_workers():
    before = set(multiprocessing.active_children())
    stream = opened(Shards(range(50)), in_workers=True)
    assert stream.read_items(2).items == [(0, 0), (1, 1)]
    stream.close()
    assert set(multiprocessing.active_children()) == before
    assert not stream.is_open


def test_without_a_way_to_pose_as_a_worker_real_ones_are_used(monkeypatch):
    monkeypatch.setattr(stream_module, "_worker_module", lambda: None)
    lists = ([1, 2, 3], [4])
    assert all_of(opened(Shards(*lists), 2)) == by_hand(lists)
    assert all_of(opened(Shards([1, 2]))) == [(0, 1), (1, 2)]


def test_torch_keeps_what_we_pose_with_and_gets_it_back():
    assert stream_module._worker_module() is not None
    all_of(opened(Shards([1], [2]), 2))
    assert get_worker_info() is None


def test_the_end_is_known_with_the_last_items():
    stream = opened(Shards(range(6)))
    assert not stream.read_items(3).is_end
    last = stream.read_items(3)
    assert last.is_end
    assert stream.is_empty()
    stream.put_back(last.items)
    assert not stream.is_empty()
    assert [item for _, item in stream.read_items(2).items] == [3, 4]
    assert stream.read_items(9).items == [(5, 5)]


def test_items_put_back_come_again_before_those_read_ahead():
    stream = opened(Shards(range(8)))
    first, second = stream.read_items(2), stream.read_items(2)
    stream.put_back(first.items + second.items)
    assert [item for _, item in all_of(stream, 3)] == list(range(8))


def test_the_dataset_is_told_the_pass():
    dataset = Shards([1])
    opened(dataset, pass_index=7)
    assert dataset.epoch == 7


def test_a_stream_that_can_seek_does_and_says_nothing(caplog):
    stream = opened(Counted())
    taken = stream.read_items(4)
    position = stream.origin().advanced(np.arange(4), taken.mark)
    assert (position.dataset_state, position.state_after) == ({"first": 4}, 4)
    fresh = Counted()
    with caplog.at_level(logging.WARNING, "pollux"):
        assert all_of(opened(fresh, position=position)) == [(number, number) for number in range(4, 10)]
    assert fresh.read == 6
    assert caplog.records == []


def test_a_place_between_two_states_is_found_by_seeking_and_skipping(caplog):
    """After a rewind the stream has been read further than the steps that are committed since."""
    stream = opened(Counted())
    position = stream.origin().advanced(np.arange(4), stream.read_items(4).mark)
    further = stream.read_items(4)
    stream.put_back(further.items)
    taken = stream.read_items(2)
    assert taken.mark is None
    position = position.advanced(np.arange(4, 6), taken.mark)
    assert (position.shards, position.state_after) == ((6,), 4)
    fresh = Counted()
    with caplog.at_level(logging.WARNING, "pollux"):
        assert all_of(opened(fresh, position=position)) == [(number, number) for number in range(6, 10)]
    assert fresh.read == 6
    assert "read and dropped [2] items" in caplog.text


def test_a_mark_does_not_follow_the_dataset():
    class Shared(Counted):
        def load_state_dict(self, state):
            self.state = state

        def state_dict(self):
            self.state["first"] = self.place + 1
            return self.state

    dataset = Shared()
    dataset.load_state_dict({})
    stream = opened(dataset)
    first = stream.read_items(2)
    stream.read_items(2)
    assert first.mark == {"first": 2}


def test_skipping_says_once_what_it_cost(caplog):
    with caplog.at_level(logging.WARNING, "pollux"):
        stream = opened(Shards(range(10), range(10)), 2, StreamPosition((4, 3)))
        all_of(stream)
    assert len(caplog.records) == 1
    assert "read and dropped [4, 3] items (per shard) in " in caplog.text


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("noisy_from", [0, 3])
def test_random_numbers_belong_to_the_item(shards, noisy_from):
    def noisy():
        return Shards(range(20), range(20, 35), noisy_from=noisy_from)

    before = RandomState.now()
    expected = all_of(opened(noisy(), shards))
    torch.rand(3), random.random(), np.random.rand()
    before_second = RandomState.now()
    assert all_of(opened(noisy(), shards), count=7) == expected
    assert not before_second.has_moved()
    numbers = np.array([number for number, _ in expected[:11]])
    position = StreamPosition((0,) * shards).advanced(numbers, None)
    assert all_of(opened(noisy(), shards, position)) == expected[11:]
    assert all_of(opened(noisy(), shards, in_workers=True)) == expected
    assert all_of(opened(noisy(), shards, seed=1)) != expected
    assert all_of(opened(noisy(), shards, pass_index=1)) != expected
    before.restore()


def test_items_that_begin_to_draw_late_are_the_same_on_every_replica():
    found = []
    for replica in range(2):
        torch.manual_seed(replica)
        random.seed(replica)
        np.random.seed(replica)
        found.append(all_of(opened(Shards(range(400), noisy_from=150)), count=10))
    assert found[0] == found[1]
    assert len({item for _, item in found[0]}) == 400


def test_items_that_draw_nothing_are_soon_read_without_seeding(monkeypatch):
    seeds: list[int] = []

    def seed(value):
        seeds.append(value)
        seed_random(value)

    monkeypatch.setattr(stream_module, "seed_random", seed)
    assert len(all_of(opened(Shards(range(5000))), count=1000)) == 5000
    assert len(seeds) < 200
