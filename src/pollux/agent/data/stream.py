"""Reads iterable datasets in an order that does not depend on replicas, from any place.

`loader` shares a step's items between replicas and forms batches.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch.utils.data

from pollux.agent.data.order import mix_seed
from pollux.agent.data.random_numbers import RandomState, isolated_random, seed_random
from pollux.agent.data.stream_position import Item, StreamItems, StreamPosition

__all__ = ["Stream", "WorkerStart"]

_log = logging.getLogger("pollux")

_STRETCH = 64


class WorkerStart:
    """Shows a worker process the user's dataset in place of our wrapper, then runs the user's `worker_init_fn`."""

    def __init__(self, dataset: Any, then: Callable[[int], object] | None) -> None:
        self.dataset = dataset
        self.then = then

    def __call__(self, worker: int) -> None:
        """Run in worker number `worker`, before it reads anything."""
        # The record is frozen, but its dataset is our wrapper.
        object.__setattr__(torch.utils.data.get_worker_info(), "dataset", self.dataset)
        if self.then is not None:
            self.then(worker)


class _Seeding:
    """Gives every item of a pass random numbers of its own, which skipping and seeking do not change.

    Seeding costs 10 µs an item, so it stops where the first items drew nothing. From then on stretches of items are
    seeded and watched: if one of them draws, each item is seeded again.
    """

    def __init__(self, pass_seed: int) -> None:
        self._pass_seed = pass_seed
        self._draws = False
        self._to_watch = _STRETCH
        self._before: RandomState | None = None

    def seed_item(self, number: int, new_stretch: bool = False) -> None:
        """Seed before item `number` is read, where that is needed."""
        if not (self._draws or self._to_watch or new_stretch):
            return
        self.note_draws()
        seed_random(mix_seed(self._pass_seed, number))
        if not self._draws:
            self._before = RandomState.now()
            self._to_watch = max(0, self._to_watch - 1)

    def note_draws(self) -> None:
        """Find out whether the last items drew random numbers.

        Call it before the generators are restored; the caller then starts a new stretch.
        """
        if self._before is not None and not self._draws:
            self._draws = self._before.has_moved()
        self._before = None


def _read(
    dataset: Iterable[Any], shard: int, num_shards: int, seeding: _Seeding, start: int, skip: int
) -> Iterator[Item]:
    """A shard's items; the dataset starts at place `start`, from which `skip` items are read and dropped."""
    seeding.seed_item(-1 - shard, new_stretch=True)
    iterator = iter(dataset)
    for place in itertools.count(start):
        number = place * num_shards + shard
        seeding.seed_item(number, new_stretch=place % _STRETCH == 0)
        try:
            item = next(iterator)
        except StopIteration:
            return
        if place >= start + skip:
            yield number, item


class _Feed(torch.utils.data.IterableDataset[Item]):
    """The dataset of a worker process: one shard, and an item that marks its end."""

    def __init__(self, dataset: Iterable[Any], seed: int, skip: Sequence[int]) -> None:
        self.dataset = dataset
        self.seed = seed
        self.skip = skip

    def __iter__(self) -> Iterator[Item]:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "only runs in workers"
        yield from _read(self.dataset, info.id, info.num_workers, _Seeding(self.seed), 0, self.skip[info.id])
        yield -1 - info.id, None


def _same(item: Any) -> Any:
    return item


class _Source(Protocol):
    def reading(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Entered around calls of `next_of`; `number` is that of the next item."""
        ...

    def next_of(self, shard: int) -> Item | None:
        """The shard's next item; None at its end."""
        ...


class _Workers:
    """Shards read by one worker process each."""

    def __init__(self, feed: _Feed, arguments: dict[str, Any]) -> None:
        generator = torch.Generator()
        generator.manual_seed(feed.seed)
        loader = torch.utils.data.DataLoader(
            feed, batch_size=None, num_workers=len(feed.skip), collate_fn=_same, generator=generator, **arguments
        )
        self._arriving = iter(loader)
        self._waiting: list[deque[Item | None]] = [deque() for _ in feed.skip]

    def reading(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def next_of(self, shard: int) -> Item | None:
        while not self._waiting[shard]:
            number, item = next(self._arriving)
            if number < 0:
                self._waiting[-1 - number].append(None)
            else:
                self._waiting[number % len(self._waiting)].append((number, item))
        return self._waiting[shard].popleft()


def _worker_module() -> Any:
    """The module in which torch keeps the answer of `get_worker_info()`; None where this torch keeps it elsewhere."""
    module = getattr(getattr(torch.utils.data, "_utils", None), "worker", None)
    return module if hasattr(module, "_worker_info") and hasattr(module, "WorkerInfo") else None


class _InProcess:
    """Shards read in this process; for each, `get_worker_info()` answers as in a worker of its own."""

    def __init__(self, dataset: Iterable[Any], seed: int, start: Sequence[int], skip: Sequence[int]) -> None:
        count = len(skip)
        self._seeding = seeding = _Seeding(seed)
        self._shards = [_read(dataset, shard, count, seeding, start[shard], skip[shard]) for shard in range(count)]
        self._module = _worker_module() if count > 1 else None
        if self._module is not None:
            about = self._module.WorkerInfo
            self._infos = [
                about(id=s, num_workers=count, seed=mix_seed(seed, s), dataset=dataset) for s in range(count)
            ]

    @contextlib.contextmanager
    def reading(self, number: int) -> Iterator[None]:
        with isolated_random():
            self._seeding.seed_item(number, new_stretch=True)
            yield
            self._seeding.note_draws()

    def next_of(self, shard: int) -> Item | None:
        if self._module is None:
            return next(self._shards[shard], None)
        before = self._module._worker_info
        self._module._worker_info = self._infos[shard]
        try:
            return next(self._shards[shard], None)
        finally:
            self._module._worker_info = before


class Stream:
    """An iterable dataset, read item by item in an order that is the same on every replica.

    It has `num_shards` virtual shards: shard s is the dataset iterated with `get_worker_info()` answering "worker s
    of `num_shards`". The shards that are not at their end give items in turn. EVERY replica reads the whole stream and
    keeps its share of each step. So heavy decoding belongs in `collate_fn`, which gets this share only, and the
    dataset must not select a part by rank. `in_workers`: one process per shard reads ahead.
    """

    def __init__(
        self, dataset: Iterable[Any], seed: int, num_shards: int, in_workers: bool, arguments: dict[str, Any]
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self.num_shards = num_shards
        self._in_workers = in_workers or (num_shards > 1 and _worker_module() is None)
        self._arguments = arguments
        stateful = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._can_seek = stateful and num_shards == 1 and not self._in_workers
        self._is_open = False
        self._source: _Source | None = None
        self._turns: list[tuple[int, int]] = []
        self._ahead: deque[Item] = deque()

    def origin(self) -> StreamPosition:
        """The position at the start of a pass."""
        return StreamPosition((0,) * self.num_shards)

    def open(self, pass_index: int, position: StreamPosition) -> None:
        """Start to read a pass from a position, by the dataset's own state where there is one, else by skipping."""
        self.close()
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(pass_index)
        start, skip = [0] * self.num_shards, list(position.shards)
        if self._can_seek and position.dataset_state is not None:
            self._dataset.load_state_dict(copy.deepcopy(position.dataset_state))  # type: ignore[attr-defined]
            start, skip = [position.state_after], [position.shards[0] - position.state_after]
        seed = mix_seed(self._seed, pass_index)
        self._turns = [(count, shard) for shard, count in enumerate(position.shards)]
        heapq.heapify(self._turns)
        self._is_open = True
        began = time.monotonic()
        if self._in_workers:
            self._source = _Workers(_Feed(self._dataset, seed, skip), self._arguments)
        else:
            self._source = _InProcess(self._dataset, seed, start, skip)
        if any(skip):
            self.is_empty()
            _log.warning(
                "stream: read and dropped %s items (per shard) in %.1f s to resume at its place; "
                "a dataset with state_dict() and load_state_dict(), read in one shard without workers, can seek",
                skip,
                time.monotonic() - began,
            )

    def read_items(self, count: int) -> StreamItems:
        """The next `count` items, fewer at the end; reads one more to find out whether this is the end."""
        with self._reading():
            self._fill(count)
            mark = None
            if self._can_seek and len(self._ahead) == count:
                mark = copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]
            self._fill(count + 1)
        items = [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]
        return StreamItems(items, mark, not self._ahead)

    def is_empty(self) -> bool:
        """Whether no item is left; reads one item ahead."""
        if not self._ahead and self._turns:
            with self._reading():
                self._fill(1)
        return not self._ahead

    def put_back(self, items: Sequence[Item]) -> None:
        """Put back the items that were read last, to be read again."""
        self._ahead.extendleft(reversed(items))

    def close(self) -> None:
        """Stop reading, and end worker processes."""
        self._is_open = False
        self._source = None
        self._turns = []
        self._ahead = deque()

    @property
    def is_open(self) -> bool:
        """Whether a pass is being read."""
        return self._is_open

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count and self._turns and self._source is not None:
            place, shard = self._turns[0]
            item = self._source.next_of(shard)
            if item is None:
                heapq.heappop(self._turns)
            else:
                heapq.heapreplace(self._turns, (place + 1, shard))
                self._ahead.append(item)
        if not self._turns:
            self._source = None

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        if self._source is None or not self._turns:
            return contextlib.nullcontext()
        place, shard = self._turns[0]
        return self._source.reading(place * self.num_shards + shard)
