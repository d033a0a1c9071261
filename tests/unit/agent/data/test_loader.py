"""The loader: every sample once per pass, in the same order, whatever happens to the replicas meanwhile."""

import gc
import itertools
import json
import multiprocessing
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils import data

from pollux.agent.data.ledger import SampleLedger
from pollux.agent.data.loader import LoaderOptions
from pollux.agent.data.permutation import pass_order
from pollux.agent.data.random_numbers import RandomState
from pollux.agent.data.step_shape import StepShape
from pollux.agent.data.torch_reader import options_of, torch_loader
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob


class Numbers(data.IterableDataset[int]):
    """0 to n-1, dealt out to workers as the documentation of torch shows it."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = data.get_worker_info()
        return iter(range(self.size) if info is None else range(info.id, self.size, info.num_workers))


class Seekable(data.IterableDataset[int]):
    """A stream that can go back to a place by itself."""

    def __init__(self, size):
        self.size = size
        self.place = 0
        self.read = 0

    def __iter__(self):
        while self.place < self.size:
            self.place += 1
            self.read += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Fleet:
    """Loaders of all replicas, driven in step as a job drives them; `passes` has the samples committed, in order."""

    def __init__(self, make, options, shapes, replicas=1):
        self.make = make
        self.options = options
        self.shapes = shapes
        self.step = 0
        self.passes = {}
        self.loaders = self.start(replicas)
        self.runs = None

    def start(self, replicas):
        return [torch_loader(self.make(), self.options, replica, replicas) for replica in range(replicas)]

    def shape(self, step):
        return StepShape(*self.shapes[step % len(self.shapes)])

    def begin(self):
        if self.runs is None:
            self.runs = [loader.micro_batches(self.shape, self.step) for loader in self.loaders]
        return self.runs

    def lose(self, count):
        """Some micro-batches are taken, not committed, and come again."""
        for run in self.begin():
            deque(itertools.islice(run, count), maxlen=0)
        self.rewind()

    def run_step(self):
        """One step on every replica; False at the end of the pass."""
        parts = [self.micro_steps(run) for run in self.begin()]
        if parts[0] is None:
            assert parts == [None] * len(parts)
            self.runs = None
            return False
        taken: list[int] = []
        for index, micro_step in enumerate(zip(*parts, strict=True)):
            by_replica = tuple(micro.samples for micro, _ in micro_step)
            for micro, batch in micro_step:
                assert micro.samples_by_replica == by_replica
                assert (micro.step, micro.index, micro.total) == (self.step, index, parts[0][0][0].total)
                assert len(batch) == max(1, micro.samples)
                taken += batch.tolist() if micro.samples else []
        assert len(taken) == parts[0][0][0].total
        assert all(batch.tolist() == taken[:1] for part in parts for micro, batch in part if not micro.samples)
        for loader in self.loaders:
            loader.commit()
        self.step += 1
        self.passes.setdefault(self.loaders[0].pass_index, []).extend(taken)
        return True

    @staticmethod
    def micro_steps(run):
        parts = []
        for micro, batch in run:
            parts.append((micro, batch))
            if micro.is_last:
                return parts
        return None

    def rewind(self):
        self.runs = None
        for loader in self.loaders:
            loader.rewind()

    def resize(self, replicas):
        """Some replicas stay, the others leave or join with the state of the first."""
        self.merge()
        self.runs = None
        state = self.loaders[0].state_dict()
        staying = self.loaders[:replicas]
        for replica, loader in enumerate(staying):
            loader.resize(replica, replicas)
        self.loaders = staying + self.start(replicas)[len(staying) :]
        for loader in self.loaders[len(staying) :]:
            loader.load_state_dict(state)

    def merge(self):
        parts = [loader.ledger.local_part() for loader in self.loaders]
        for loader in self.loaders:
            loader.ledger.absorb(sum(part[0] for part in parts), sum(part[1] for part in parts))

    def restart(self, replicas):
        self.merge()
        states = [loader.state_dict() for loader in self.loaders]
        orders = [state.pop("order") for state in states]
        assert all(state == states[0] for state in states)
        state = json.loads(json.dumps(states[0])) | {"order": orders[0]}
        for loader in self.loaders:
            loader.close()
        self.loaders = self.start(replicas)
        self.runs = None
        for loader in self.loaders:
            loader.load_state_dict(state)

    def finish_pass(self):
        while self.run_step():
            pass
        self.merge()
        for loader in self.loaders:
            assert loader.pass_done
            assert loader.ledger == loader.expected_ledger()
            assert loader.ledger.count == loader.cursor == len(self.passes[loader.pass_index])

    def next_pass(self):
        self.finish_pass()
        self.runs = None
        for loader in self.loaders:
            loader.next_pass()


EVENTS = st.lists(
    st.tuples(st.sampled_from(["step", "step", "lose", "resize", "restart"]), st.integers(1, 4)), max_size=12
)
SHAPES = st.lists(st.tuples(st.integers(1, 23), st.integers(1, 3), st.booleans()), min_size=1, max_size=4)


def live(fleet, events):
    for event, number in events:
        if event == "step":
            fleet.run_step()
        elif event == "lose":
            fleet.lose(number)
        elif event == "resize":
            fleet.resize(number)
        else:
            fleet.restart(number)


def whole_pass(fleet, events):
    live(fleet, events)
    fleet.next_pass()
    live(fleet, events[::-1])
    fleet.finish_pass()
    return fleet.passes


def without_rest(order, fleet):
    """What of an order `drop_last` leaves: it must have dropped less than one step."""
    taken = len(fleet.passes[0])
    assert len(order) - taken < max(total for total, *_ in fleet.shapes)
    return order[:taken]


@given(size=st.integers(1, 60), shapes=SHAPES, events=EVENTS, shuffle=st.booleans(), drop=st.booleans())
@settings(max_examples=150)
@example(size=10, shapes=[(3, 1, False)], events=[("step", 1), ("restart", 3)], shuffle=True, drop=False)
@example(size=2, shapes=[(2, 2, True)], events=[("resize", 4)], shuffle=True, drop=False)
@example(size=7, shapes=[(4, 1, False)], events=[("step", 1), ("step", 1), ("restart", 2)], shuffle=True, drop=True)
def test_a_pass_is_its_order_through_any_events(size, shapes, events, shuffle, drop):
    if drop:
        shapes = [(min(total, size), *rest) for total, *rest in shapes]
    fleet = Fleet(lambda: list(range(size)), LoaderOptions(shuffle=shuffle, seed=5, drop_last=drop), shapes)
    for number, taken in whole_pass(fleet, events).items():
        order = pass_order(size, 5, number, shuffle).tolist()
        assert taken == (order[: len(taken)] if drop else order)
    if drop:
        without_rest(order, fleet)


@given(size=st.integers(1, 60), shapes=SHAPES, events=EVENTS, shards=st.sampled_from([1, 3]), drop=st.booleans())
@settings(max_examples=100)
@example(size=6, shapes=[(3, 1, False)], events=[("step", 1), ("step", 1), ("restart", 1)], shards=1, drop=True)
def test_a_stream_keeps_its_order_through_any_events(size, shapes, events, shards, drop):
    if drop:
        shapes = [(min(total, size), *rest) for total, *rest in shapes]
    fleet = Fleet(lambda: Numbers(size), LoaderOptions(num_shards=shards, drop_last=drop), shapes)
    for taken in whole_pass(fleet, events).values():
        assert taken == list(range(len(taken) if drop else size))
    if drop:
        without_rest(list(range(size)), fleet)
    assert all(loader.size == size for loader in fleet.loaders)


@given(size=st.integers(1, 60), shapes=SHAPES, events=EVENTS)
@settings(max_examples=50)
def test_a_seekable_stream_keeps_its_order_through_any_events(size, shapes, events):
    fleet = Fleet(lambda: Seekable(size), LoaderOptions(), shapes)
    for taken in whole_pass(fleet, events).values():
        assert taken == list(range(size))


@given(size=st.integers(1, 40), shapes=SHAPES, events=EVENTS)
@settings(max_examples=50)
def test_a_custom_sampler_is_followed_even_where_it_cannot_be_repeated(size, shapes, events):
    class Moody:
        """Gives something else each time it is asked, as a sampler with a memory does."""

        def __iter__(self):
            self.times = getattr(self, "times", 0) + 1
            return iter([(index * self.times) % size for index in range(size + 3)])

    sampler = Moody()
    fleet = Fleet(lambda: list(range(size)), LoaderOptions(sampler=sampler), shapes)
    order = fleet.loaders[0].state_dict()["order"].tolist()
    live(fleet, events)
    fleet.finish_pass()
    assert fleet.passes[0] == order
    assert fleet.loaders[0].size == size + 3


class TensorNumbers(data.Dataset[int]):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_and_leave_nothing_behind(persistent):
    before = set(multiprocessing.active_children())
    options = LoaderOptions(num_workers=2, persistent_workers=persistent)
    fleet = Fleet(lambda: TensorNumbers(50), options, [(7, 2), (12, 1), (3, 1)], replicas=2)
    events = [("step", 0), ("lose", 3), ("step", 0), ("restart", 1), ("step", 0)]
    for number, taken in whole_pass(fleet, events).items():
        assert taken == pass_order(50, 0, number).tolist()
    for loader in fleet.loaders:
        loader.close()
    assert set(multiprocessing.active_children()) == before


def test_persistent_workers_survive_passes_and_rewinds():
    loader = torch_loader(TensorNumbers(40), LoaderOptions(num_workers=1, persistent_workers=True), 0, 1)
    workers = []
    for _ in range(3):
        for micro, _ in loader.micro_batches(lambda step: StepShape(8, 1), 0):
            workers.append(tuple(child.pid for child in multiprocessing.active_children()))
            if micro.step == 2:
                break
            loader.commit()
        for _ in loader.micro_batches(lambda step: StepShape(8, 1), 2):
            loader.commit()
        loader.next_pass()
    loader.close()
    assert len(set(workers)) == 1
    assert len(workers[0]) == 1


def test_a_loop_that_is_left_ends_its_workers():
    before = set(multiprocessing.active_children())
    loader = torch_loader(TensorNumbers(40), LoaderOptions(num_workers=1), 0, 1)
    for _ in loader.micro_batches(lambda step: StepShape(4, 1), 0):
        break
    assert set(multiprocessing.active_children()) == before


def test_a_loader_that_is_dropped_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        for options in (LoaderOptions(), LoaderOptions(num_workers=1, persistent_workers=True)):
            before = set(multiprocessing.active_children())
            loader = torch_loader(TensorNumbers(40), options, 0, 1)
            for _ in loader.micro_batches(lambda step: StepShape(4, 1), 0):
                break
            del loader
            assert set(multiprocessing.active_children()) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 2])
def test_every_replica_asks_for_the_same_shapes_at_the_same_time(workers):
    """The answer may depend on what was committed so far: the asking must come at the same point everywhere."""
    asked = []
    for replica in range(3):
        loader = torch_loader(
            TensorNumbers(100), LoaderOptions(num_workers=workers, prefetch_factor=workers or None), replica, 3
        )
        seen: list[tuple[int, int]] = []

        def shape(step, loader=loader, seen=seen):
            seen.append((step, loader.cursor))
            return StepShape(5 + loader.cursor // 10, 1 + step % 2)

        for micro, _ in loader.micro_batches(shape, 4):
            if micro.is_last:
                loader.commit()
        assert loader.pass_done
        asked.append(seen)
    assert asked[0] == asked[1] == asked[2]
    assert [step for step, _ in asked[0]] == list(range(4, 4 + len(asked[0])))
    assert (asked[0][1][1] == 0) == (workers > 0)


class Augmented(data.Dataset[torch.Tensor]):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def augmented(replicas, workers, sampler=None):
    rows = []
    loaders = [
        torch_loader(Augmented(), LoaderOptions(seed=3, num_workers=workers, sampler=sampler), replica, replicas)
        for replica in range(replicas)
    ]
    for loader in loaders:
        for micro, batch in loader.micro_batches(lambda step: StepShape(10, 2), 0):
            rows += batch[: micro.samples].tolist()
            if micro.is_last:
                loader.commit()
    return sorted(rows)


def test_augmentation_does_not_depend_on_replicas_or_workers():
    torch.manual_seed(0)
    before = RandomState.now()
    alone = augmented(1, 0)
    assert not before.has_moved()
    assert len({value for row in alone for value in row[1:]}) == 3 * 24
    torch.manual_seed(1)
    assert augmented(3, 0) == alone
    assert augmented(2, 2) == alone


def test_augmentation_differs_between_passes_and_between_repeats_of_a_sampler():
    loader = torch_loader(Augmented(), LoaderOptions(shuffle=False), 0, 1)
    passes = []
    for _ in range(2):
        for _, batch in loader.micro_batches(lambda step: StepShape(24, 1), 0):
            passes.append(batch)
            loader.commit()
        loader.next_pass()
    assert torch.equal(passes[0][:, 0], passes[1][:, 0])
    assert not (passes[0][:, 1:] == passes[1][:, 1:]).any()
    repeated = augmented(1, 0, sampler=[4, 4, 4])
    assert len({tuple(row) for row in repeated}) == 3
    assert augmented(2, 0, sampler=[4, 4, 4]) == repeated


def test_the_users_random_numbers_are_never_drawn():
    before = RandomState.now()
    for dataset in (TensorNumbers(10), data.TensorDataset(torch.arange(10)), Numbers(10), Augmented()):
        for _ in torch_loader(dataset, LoaderOptions(), 0, 1).micro_batches(lambda step: StepShape(4, 1), 0):
            pass
    assert not before.has_moved()


def test_plain_pytorch_in_the_same_order_sees_the_same_batches():
    dataset = data.TensorDataset(torch.randn(50, 3), torch.arange(50))
    plain = data.DataLoader(dataset, batch_size=8, sampler=pass_order(50, 9, 0).tolist())
    ours = torch_loader(dataset, LoaderOptions(seed=9), 0, 1).micro_batches(lambda step: StepShape(8, 1), 0)
    for expected, (_, batch) in zip(plain, ours, strict=True):
        assert type(batch) is type(expected)
        assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))


def test_commit_and_next_pass_only_when_it_is_time():
    loader = torch_loader(TensorNumbers(10), LoaderOptions(), 0, 1)
    with pytest.raises(MisusedJob, match="no step is waiting"):
        loader.commit()
    run = loader.micro_batches(lambda step: StepShape(6, 2), 0)
    next(run)
    with pytest.raises(MisusedJob, match="no step is waiting"):
        loader.commit()
    next(run)
    loader.commit()
    assert loader.cursor == 6
    with pytest.raises(MisusedJob, match="pass 0 is not done: 6 of 10 samples"):
        loader.next_pass()


def test_steps_commit_in_order_after_running_ahead():
    loader = torch_loader(TensorNumbers(10), LoaderOptions(shuffle=False), 0, 1)
    run = loader.micro_batches(lambda step: StepShape(3, 1), 0)
    next(run)
    next(run)
    loader.commit()
    assert loader.ledger == SampleLedger.of_range(3)
    loader.rewind()
    assert list(run) == []
    assert [batch.tolist() for _, batch in loader.micro_batches(lambda step: StepShape(4, 1), 1)] == [
        [3, 4, 5, 6],
        [7, 8, 9],
    ]


def test_a_state_needs_a_merged_ledger():
    loader = torch_loader(TensorNumbers(10), LoaderOptions(), 0, 2)
    next(loader.micro_batches(lambda step: StepShape(4, 1), 0))
    loader.state_dict()
    run = loader.micro_batches(lambda step: StepShape(4, 1), 0)
    next(run)
    loader.commit()
    with pytest.raises(MisusedJob, match="0 merged samples and 4 are committed"):
        loader.state_dict()


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (TensorNumbers(11), LoaderOptions(), "size 10, this job's has 11"),
        (TensorNumbers(10), LoaderOptions(seed=1), "seed 0, this job's has 1"),
        (TensorNumbers(10), LoaderOptions(shuffle=False), "shuffle True, this job's has False"),
        (TensorNumbers(10), LoaderOptions(sampler=[1, 2]), "kind 'map', this job's has 'sampler'"),
        (Numbers(10), LoaderOptions(), "kind 'map', this job's has 'stream'"),
    ],
)
def test_a_state_of_other_data_is_refused(dataset, options, says):
    state = torch_loader(TensorNumbers(10), LoaderOptions(), 0, 1).state_dict()
    with pytest.raises(CheckpointMismatch, match=says):
        torch_loader(dataset, options, 0, 1).load_state_dict(state)


def test_a_stream_of_other_shards_is_refused():
    state = torch_loader(Numbers(10), LoaderOptions(num_shards=3), 0, 1).state_dict()
    with pytest.raises(CheckpointMismatch, match="num_shards 3, this job's has 1"):
        torch_loader(Numbers(10), LoaderOptions(), 0, 1).load_state_dict(state)


class NoLength:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        (NoLength(), {}, "NoLength has neither __getitem__ with __len__ nor __iter__"),
        (object(), {}, "object has neither"),
        ([], {}, "empty"),
        (iter([1, 2]), {}, "ends after one pass"),
        (Numbers(5), {"sampler": [1]}, "a sampler has no meaning"),
        (Numbers(5), {"num_shards": 3, "num_workers": 2}, "num_workers is 2 and num_shards 3"),
        ([1, 2], {"sampler": [2]}, "index 2, outside"),
        ([1, 2], {"sampler": data.DistributedSampler(data.TensorDataset(torch.arange(2)), 2, 0)}, "DistributedSampler"),
    ],
)
def test_data_that_cannot_be_read_is_refused_at_once(dataset, options, says):
    with pytest.raises(InvalidInput, match=says):
        torch_loader(dataset, LoaderOptions(**options), 0, 1)


def test_an_empty_stream_is_refused_when_it_is_read():
    with pytest.raises(InvalidInput, match="Numbers gave no items"):
        list(torch_loader(Numbers(0), LoaderOptions(), 0, 1).micro_batches(lambda step: StepShape(1, 1), 0))


@pytest.mark.parametrize(
    "options", [{"num_workers": -1}, {"prefetch_factor": 0}, {"num_shards": 0}, {"timeout": -1.0}], ids=str
)
def test_impossible_options_are_refused(options):
    with pytest.raises(InvalidInput, match="must be at least"):
        LoaderOptions(**options)


@pytest.mark.parametrize("shape", [StepShape(0, 1), StepShape(1, 0)])
def test_a_step_of_nothing_is_refused(shape):
    with pytest.raises(InvalidInput, match="at least one sample and one micro-step"):
        next(torch_loader([1], LoaderOptions(), 0, 1).micro_batches(lambda step: shape, 0))


def test_a_replica_that_does_not_exist_is_refused():
    loader = torch_loader([1], LoaderOptions(), 0, 1)
    with pytest.raises(InvalidInput, match="replica 2 of 2"):
        loader.resize(2, 2)


def test_a_users_dataloader_is_taken_apart():
    dataset = TensorNumbers(10)
    generator = torch.Generator().manual_seed(42)
    options = options_of(
        data.DataLoader(dataset, 4, shuffle=True, generator=generator, drop_last=True, num_workers=1, prefetch_factor=3)
    )
    assert (options.shuffle, options.seed, options.sampler, options.drop_last) == (True, 42, None, True)
    assert (options.num_workers, options.prefetch_factor, options.num_shards) == (1, 3, None)
    in_order = options_of(data.DataLoader(dataset, 4))
    assert (in_order.shuffle, in_order.prefetch_factor, in_order.sampler) == (False, None, None)
    distributed: data.DistributedSampler[int] = data.DistributedSampler(dataset, 2, 1, seed=7)
    options = options_of(data.DataLoader(dataset, 4, sampler=distributed))
    assert (options.shuffle, options.seed, options.sampler) == (True, 7, None)
    for sampler in (
        data.SubsetRandomSampler([1, 2]),
        data.RandomSampler(dataset, replacement=True),
        data.RandomSampler(dataset, num_samples=3),
    ):
        assert options_of(data.DataLoader(dataset, 4, sampler=sampler)).sampler is sampler
    stream = options_of(data.DataLoader(Numbers(10), 4, num_workers=2))
    assert (stream.num_workers, stream.sampler) == (2, None)


def test_a_users_dataloader_that_makes_its_own_batches_is_refused():
    batches = data.BatchSampler(data.SequentialSampler(range(10)), 2, drop_last=False)
    with pytest.raises(InvalidInput, match=r"made with batch_sampler.*make it with batch_size="):
        options_of(data.DataLoader(TensorNumbers(10), batch_sampler=batches))
    with pytest.raises(InvalidInput, match="made with batch_size=None"):
        options_of(data.DataLoader(TensorNumbers(10), batch_size=None))


class Told:
    """A `worker_init_fn` that changes the dataset it is told about."""

    def __call__(self, worker):
        info: Any = data.get_worker_info()
        info.dataset.size = 100 + worker


class Sized(TensorNumbers):
    def __getitem__(self, index):
        return self.size


def test_worker_init_fn_sees_the_users_dataset():
    loader = torch_loader(Sized(10), LoaderOptions(num_workers=1, worker_init_fn=Told(), collate_fn=sum), 0, 1)
    assert [batch for _, batch in loader.micro_batches(lambda step: StepShape(5, 1), 0)] == [500, 500]


@pytest.mark.parametrize("dataset", [TensorNumbers(10), Numbers(10)], ids=["map", "stream"])
def test_memory_is_pinned_where_there_is_an_accelerator_and_only_there(dataset, monkeypatch):
    def run():
        loader = torch_loader(dataset, LoaderOptions(shuffle=False, pin_memory=True), 0, 1)
        return [batch.tolist() for _, batch in loader.micro_batches(lambda step: StepShape(5, 1), 0)]

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert run() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: -tensor)
    assert run() == [[0, -1, -2, -3, -4], [-5, -6, -7, -8, -9]]


@pytest.mark.parametrize("dataset", [TensorNumbers(10), Numbers(10)], ids=["map", "stream"])
def test_what_was_dropped_stays_dropped(dataset):
    loader = torch_loader(dataset, LoaderOptions(drop_last=True), 0, 1)
    assert loader.expected_ledger() is None
    for _ in loader.micro_batches(lambda step: StepShape(4, 1), 0):
        loader.commit()
    loader.rewind()
    assert (loader.cursor, loader.pass_done, loader.size) == (8, True, 10)
    resumed = torch_loader(dataset, LoaderOptions(drop_last=True), 0, 1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.pass_done
    assert list(resumed.micro_batches(lambda step: StepShape(1, 1), 2)) == []
    assert resumed.ledger == resumed.expected_ledger() == loader.ledger
