"""The order of a pass, and reading samples with random numbers of their own."""

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Subset, SubsetRandomSampler, TensorDataset, default_collate

from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.order import PassOrder, mix_seed
from pollux.agent.data.permutation import draw_indices, pass_order
from pollux.agent.data.random_numbers import RandomState, isolated_random, seed_random
from pollux.agent.data.sample_reader import SampleReader
from pollux.core.errors import InvalidInput

DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "random": random.random,
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
}


def drawn_order(sampler, size, seed, pass_index):
    return PassOrder(size, drawn=draw_indices(sampler, size, seed, pass_index))


def draw_all():
    return [draw() for draw in DRAWS.values()]


def test_the_order_follows_from_seed_and_pass():
    first = pass_order(100, 7, 0)
    assert sorted(first.tolist()) == list(range(100))
    assert torch.equal(first, pass_order(100, 7, 0))
    assert not torch.equal(first, pass_order(100, 7, 1))
    assert not torch.equal(first, pass_order(100, 8, 0))
    assert pass_order(5, 7, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_order_gives_its_places_and_what_they_leave(shuffle):
    order = PassOrder(50, pass_order(50, 3, 2).numpy() if shuffle else None)
    assert order.size == 50
    assert order.indices(10, 20).tolist() == pass_order(50, 3, 2, shuffle)[10:20].tolist()
    assert order.ledger(50) == SampleLedger.of_range(50)
    assert order.ledger(20) == SampleLedger.of(pass_order(50, 3, 2, shuffle)[:20].numpy())


def test_making_an_order_leaves_the_users_random_numbers_alone():
    before = RandomState.now()
    PassOrder(50, pass_order(50, 3, 2).numpy())
    drawn_order(RandomSampler(range(50), replacement=True), 50, 3, 2)
    assert not before.has_moved()


@pytest.mark.parametrize("generator", [None, 1, 2])
def test_every_replica_draws_the_same_from_a_sampler(generator):
    drawn = []
    for replica in range(2):
        own = None if generator is None else torch.Generator().manual_seed(generator + replica)
        torch.manual_seed(replica)
        sampler = SubsetRandomSampler([2, 3, 5, 7], generator=own)
        drawn.append([drawn_order(sampler, 10, 0, number).indices(0, 4).tolist() for number in range(6)])
    assert drawn[0] == drawn[1]
    assert len({tuple(order) for order in drawn[0]}) > 1


def test_a_sampler_is_told_the_pass_and_may_repeat_or_leave_out():
    class Sampler:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch, 0, torch.tensor(0), np.int64(3)])

    order = drawn_order(Sampler(), 5, 0, 4)
    assert order.drawn is not None
    assert order.indices(0, 4).tolist() == [4, 0, 0, 3]
    assert order.ledger(4) == SampleLedger.of(np.array([0, 0, 3, 4]))
    assert order.ledger(4) != SampleLedger.of(np.array([0, 3, 3, 4]))


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        ([0, 10], "index 10, outside of the dataset's 0 to 9"),
        ([0, -1], "index -1, outside"),
        ([], "no index at all"),
        ([[0, 1], [2, 3]], "one integer per sample"),
        ([0.5], "one integer per sample"),
        (["a"], "one integer per sample"),
    ],
)
def test_bad_samplers_are_refused(sampler, says):
    with pytest.raises(InvalidInput, match=says):
        drawn_order(sampler, 10, 0, 0)


def test_a_sampler_without_end_is_refused():
    class Endless:
        def __iter__(self):
            return itertools.repeat(0)

    with pytest.raises(InvalidInput, match="a pass must end"):
        drawn_order(Endless(), 10, 0, 0)


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_and_undone(name):
    seed_random(1)
    before = RandomState.now()
    assert not before.has_moved()
    expected = draw_all()
    before.restore()
    DRAWS[name]()
    assert before.has_moved()
    before.restore()
    assert not before.has_moved()
    assert draw_all() == expected


def test_another_numpy_generator_is_watched_too():
    class Other(np.random.PCG64):
        pass

    before = np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(Other(3))
    try:
        state = RandomState.now()
        assert not state.has_moved()
        np.random.rand()
        assert state.has_moved()
        state.restore()
    finally:
        np.random.mtrand.set_bit_generator(before)


def test_isolated_random_numbers_are_put_back_even_after_an_error():
    seed_random(5)
    np.random.randn()  # leaves a second normal variate in the cache, which must survive
    before, expected = RandomState.now(), None
    with isolated_random():
        expected = draw_all()
    with contextlib.suppress(ZeroDivisionError), isolated_random():
        seed_random(9)
        raise ZeroDivisionError
    assert not before.has_moved()
    assert draw_all() == expected


def test_seeds_of_neighbours_have_nothing_in_common():
    seeds = {mix_seed(seed, number, index) for seed in range(4) for number in range(4) for index in range(-1, 100)}
    assert len(seeds) == 4 * 4 * 101
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)


class Noisy:
    """Draws from one of the generators, from sample `since` on."""

    def __init__(self, draw, since=0):
        self.draw = draw
        self.since = since
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return (index, self.draw() if index >= self.since else 0.0)


def read(reader, batches, keys=None):
    found: dict[int, float] = {}
    for batch in batches:
        found.update(zip(*(part.tolist() for part in reader.__getitems__((11, keys, batch))), strict=True))
    return found


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("since", [0, 5])
def test_samples_come_out_the_same_however_they_are_grouped(name, since):
    before = RandomState.now()
    one = read(SampleReader(Noisy(DRAWS[name], since), default_collate), [[0, 1, 2], [3, 4, 5, 6], [7]])
    DRAWS[name]()
    before.restore()
    other = read(SampleReader(Noisy(DRAWS[name], since), default_collate), [[7, 6], [5], [4], [0, 1, 2, 3]])
    assert one == other
    assert len(set(one.values())) == 8 - since + (since > 0)
    assert not before.has_moved()


def test_a_place_may_stand_for_the_sample():
    reader = SampleReader(Noisy(random.random), default_collate)
    _, values = reader.__getitems__((11, range(2), [4, 4]))
    assert values[0] != values[1]
    _, again = reader.__getitems__((11, range(1, 2), [4]))
    assert again[0] == values[1]


def test_a_dataset_that_draws_nothing_is_read_once_and_in_one_go():
    class Whole:
        def __init__(self):
            self.asked = []

        def __getitems__(self, indices):
            self.asked.append(list(indices))
            return [index * 2 for index in indices]

    dataset = Whole()
    assert SampleReader(dataset, default_collate).__getitems__((0, None, [1, 2])).tolist() == [2, 4]
    assert dataset.asked == [[1, 2]]


def test_a_dataset_that_makes_the_batch_itself_keeps_doing_so():
    class Ready:
        def __getitems__(self, indices):
            return {"x": torch.tensor(indices), "noise": torch.rand(len(indices))}

    reader = SampleReader(Ready(), lambda batch: batch)
    first = reader.__getitems__((0, None, [1, 2]))
    assert first["x"].tolist() == [1, 2]
    assert torch.equal(first["noise"], reader.__getitems__((0, None, [1, 2]))["noise"])


def test_a_collate_function_that_draws_is_repeatable():
    reader = SampleReader(list(range(10)), lambda batch: (batch, random.random()))
    first = reader.__getitems__((0, None, [1, 2]))
    random.random()
    assert reader.__getitems__((0, None, [1, 2])) == first
    assert reader.__getitems__((1, None, [1, 2])) != first


def test_tensors_are_not_even_watched():
    tensors = TensorDataset(torch.arange(10))
    assert SampleReader(tensors, default_collate).never_draws
    assert SampleReader(Subset(Subset(tensors, [3, 4]), [0]), default_collate).never_draws
    assert not SampleReader(tensors, lambda batch: batch).never_draws
    assert not SampleReader(list(range(10)), default_collate).never_draws
