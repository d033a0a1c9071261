"""Batches for one replica: every sample exactly once per pass, at any number of replicas and through any resize.

The loader knows which samples are due and which were used. A framework reads them, PyTorch by `torch_reader`. The
caller says how large a step is.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pollux.agent.data.batch_reader import BatchReader
from pollux.agent.data.ledger import Indices, SampleLedger
from pollux.agent.data.order import PassOrder, ReadRequest, mix_seed
from pollux.agent.data.step_shape import MicroBatch, StepShape, share
from pollux.agent.data.stream_position import Item, StreamPosition
from pollux.core.errors import CheckpointMismatch, InvalidInput, MisusedJob

__all__ = ["Loader", "LoaderOptions"]

_Run = Generator[tuple[MicroBatch, Any], None, None]
_Shapes = Callable[[int], StepShape]


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """How samples are ordered, collated and read ahead; most options are those of `torch.utils.data.DataLoader`.

    `sampler` replaces `shuffle`: any iterable of indices, iterated once per pass. `num_shards` is for iterable datasets
    only: their virtual shards, fixed for the life of a job; None: one per worker, at least one.
    """

    shuffle: bool = True
    seed: int = 0
    sampler: Iterable[int] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = False
    worker_init_fn: Callable[[int], object] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
    persistent_workers: bool = False
    num_shards: int | None = None
    timeout: float = 0

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("prefetch_factor", 1), ("num_shards", 1), ("timeout", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} is {value}; it must be at least {least}")


@functools.lru_cache(maxsize=64)
def _parts(total: int, num_replicas: int, repeats: int, replica: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """This replica's (first, end) in every micro-step, and how many samples each replica has in it."""
    return [
        (*parts[replica], tuple(end - first for first, end in parts)) for parts in share(total, num_replicas, repeats)
    ]


@dataclass(slots=True)
class _Step:
    """A step that was issued and is not committed yet."""

    total: int
    own: list[Indices]
    # Streams only: all items of the step, which a rewind puts back, and the position after it.
    items: list[Item] = field(default_factory=list)
    position: StreamPosition | None = None


def _micro_batches(
    step: int, shape: StepShape, total: int, replica: int, num_replicas: int
) -> Iterator[tuple[MicroBatch, int, int]]:
    """This replica's micro-batches of a step, each with its first and end place; a filler has the first sample."""
    for index, (first, end, by_replica) in enumerate(_parts(total, num_replicas, shape.repeats, replica)):
        micro = MicroBatch(step, index, shape.repeats, end - first, total, shape.measured, by_replica)
        yield (micro, first, end) if end > first else (micro, 0, 1)


def _ask(shape: _Shapes, step: int) -> StepShape:
    asked = shape(step)
    if asked.total < 1 or asked.repeats < 1:
        raise InvalidInput(f"step {step} was given {asked}; a step needs at least one sample and one micro-step")
    return asked


class Loader:
    """Yields one replica's micro-batches, and knows which samples all replicas have committed.

    All replicas have the same `pass_index`, `cursor` and order, and ask for the same shapes; they differ only in their
    parts of a step. A step's samples count once `commit()` is called.
    """

    def __init__(self, reader: BatchReader, options: LoaderOptions, replica: int, num_replicas: int) -> None:
        self.options = options
        self.pass_index = 0
        self.cursor = 0
        self.ledger = SampleLedger()
        self._reader = reader
        self._length = reader.length
        self._steps: deque[_Step] = deque()
        self._yielded = 0
        self._run: weakref.ref[_Run] | None = None
        self._order: PassOrder | None = None
        self._dropped_at: int | None = None
        self._stream_end: int | None = None
        self._stream_size: int | None = None
        self._stream = reader.stream
        self._position = self._stream.origin() if self._stream else StreamPosition(())
        self._set_replica(replica, num_replicas)
        if options.sampler is not None:
            self._current_order()

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self._reader.dataset

    def _set_replica(self, replica: int, num_replicas: int) -> None:
        if not 0 <= replica < num_replicas:
            raise InvalidInput(f"replica {replica} of {num_replicas} does not exist; they count from 0")
        self.replica = replica
        self.num_replicas = num_replicas

    @property
    def size(self) -> int | None:
        """Samples of a pass, including those that `drop_last` will drop.

        For a stream: its `__len__` until its end has been read; None without one.
        """
        if self._stream is None:
            return self._current_order().size if self.options.sampler is not None else self._length
        return self._length if self._stream_size is None else self._stream_size

    @property
    def pass_done(self) -> bool:
        """Whether all of this pass has been committed, except a remainder that `drop_last` drops.

        With `drop_last`, and for a stream, this is known only after `micro_batches()` has ended.
        """
        if self._dropped_at is not None:
            return self.cursor == self._dropped_at
        return self.cursor == (self.size if self._stream is None else self._stream_end)

    def micro_batches(self, shape: Callable[[int], StepShape], first_step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """This replica's micro-batches from the cursor to the end of the pass, each with its collated batch.

        `shape(step)` is called once per step, in order, when its samples are issued: with workers `prefetch_factor` ×
        `num_workers` micro-batches ahead (the same on every replica), else just before. The last step has the samples
        that are left, or `drop_last` drops them. A replica without samples in a micro-step gets a filler batch of one.
        Steps that were yielded before and not committed are yielded again.
        """
        self.rewind()
        run = self._map_run(shape, first_step) if self._stream is None else self._stream_run(shape, first_step)
        # A weak reference, so that a loop that ends by `break` ends the worker processes at once.
        self._run = weakref.ref(run)
        return run

    def commit(self) -> None:
        """Count the samples of the oldest yielded step: the optimiser has used them."""
        if self._yielded == 0:
            raise MisusedJob("no step is waiting to be committed; commit once after each step's last micro-batch")
        self._yielded -= 1
        step = self._steps.popleft()
        self.cursor += step.total
        for indices in step.own:
            self.ledger.add(indices)
        if step.position is not None:
            self._position = step.position

    def rewind(self) -> None:
        """Forget the steps that were issued and not committed: `micro_batches()` starts at the cursor again."""
        run = self._run() if self._run is not None else None
        if run is not None:
            run.close()
        self._run = None
        if self._stream is not None:
            self._stream.put_back([item for step in self._steps for item in step.items])
        self._steps.clear()
        self._yielded = 0
        if self._dropped_at != self.cursor:
            self._dropped_at = None

    def resize(self, replica: int, num_replicas: int) -> None:
        """Rewind, and continue from the cursor as `replica` of `num_replicas`."""
        self.rewind()
        self._set_replica(replica, num_replicas)

    def end_workers(self) -> None:
        """Rewind, and end the worker processes of a map-style dataset, persistent ones too."""
        self.rewind()
        self._reader.end_workers()

    def next_pass(self) -> None:
        """Start the next pass, in another order, with an empty ledger."""
        if not self.pass_done:
            raise MisusedJob(f"pass {self.pass_index} is not done: {self.cursor} of {self.size} samples are committed")
        self._start(self.pass_index + 1)

    def skip_pass(self) -> None:
        """Start the next pass although this one is not done; the rest of this one is never used."""
        self.rewind()
        self._start(self.pass_index + 1)

    def following(self) -> Loader:
        """Another loader, at the start of the next pass, while steps of this one are under way."""
        loader = Loader(self._reader.again(), self.options, self.replica, self.num_replicas)
        loader.load_state_dict({**loader.state_dict(), "pass": self.pass_index + 1, "order": None})
        return loader

    def close(self) -> None:
        """Rewind, and end worker processes and the stream."""
        self.rewind()
        self._reader.end_workers()
        if self._stream is not None:
            self._stream.close()

    def expected_ledger(self) -> SampleLedger | None:
        """The ledger after the whole pass; None while its end is not known (streams, `drop_last`)."""
        if self._stream is not None:
            return self._position.ledger() if self.pass_done else None
        if self.options.drop_last and not self.pass_done:
            return None
        order = self._current_order()
        return order.ledger(order.size if self._dropped_at is None else self._dropped_at)

    def rebuild_ledger(self) -> None:
        """Make the ledger from the committed places of this pass, after replicas were lost with their local parts."""
        self.rewind()
        known = self._position.ledger() if self._stream is not None else self._current_order().ledger(self.cursor)
        self.ledger = SampleLedger()
        self.ledger.merge(known.count, known.digest)

    @property
    def dataset_state(self) -> object:
        """A stream's own state at the cursor; None where it has none."""
        return self._position.dataset_state

    def order_hash(self) -> int:
        """A hash of the sampler's order of this pass, by which replicas compare theirs; 0 without a sampler.

        It has 52 bits, so that a float holds it. Without a sampler the order depends on seed and size alone.
        """
        drawn = self._current_order().drawn if self._stream is None and self.options.sampler is not None else None
        if drawn is None:
            return 0
        return int.from_bytes(hashlib.blake2b(drawn.tobytes(), digest_size=8).digest(), "little") >> 12

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, as plain values and at most one tensor; equal on all replicas, for any number of them.

        The local parts of the ledger must have been merged before.
        """
        if self.num_replicas == 1:
            self.ledger.absorb(*self.ledger.local_part())
        if self.ledger.merged_count != self.cursor:
            raise MisusedJob(
                f"the ledger has {self.ledger.merged_count} merged samples and {self.cursor} are committed; "
                "absorb the sum of all replicas' local parts before saving"
            )
        drawn = self._current_order().drawn if self._stream is None and self.options.sampler is not None else None
        return {
            "kind": self._kind(),
            "pass": self.pass_index,
            "cursor": self.cursor,
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "size": self._length if self._stream is None else self._stream_size,
            "order": None if drawn is None else self._reader.to_saved(drawn),
            "dropped_at": self._dropped_at if self._dropped_at == self.cursor else None,
            "stream_end": self._stream_end,
            "shards": list(self._position.shards),
            "dataset_state": self._position.dataset_state,
            "dataset_state_after": self._position.state_after,
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the place of a `state_dict()`, at any number of replicas."""
        self.check_state(state)
        self._start(state["pass"])
        self.cursor = state["cursor"]
        self.ledger = SampleLedger.from_state(state["ledger"])
        self._dropped_at = state["dropped_at"]
        if self._stream is not None:
            self._stream_size = state["size"]
            self._stream_end = state["stream_end"]
            self._position = StreamPosition(
                tuple(state["shards"]), state["dataset_state"], state["dataset_state_after"]
            )
        elif state["order"] is not None:
            drawn = np.asarray(state["order"], dtype=np.int64).copy()
            self._order = PassOrder(self._dataset_size(), drawn=drawn)

    def _kind(self) -> str:
        if self._stream is not None:
            return "stream"
        return "map" if self.options.sampler is None else "sampler"

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise `CheckpointMismatch` where a state is of other data; changes nothing."""
        here: dict[str, Any] = {"kind": self._kind(), "seed": self.options.seed}
        if self._stream is not None:
            here["num_shards"] = self._stream.num_shards
        else:
            here |= {"shuffle": self.options.shuffle, "size": self._length}
        there = {**state, "num_shards": len(state["shards"])}
        for name, value in here.items():
            if there[name] != value:
                raise CheckpointMismatch(
                    f"the checkpoint's data has {name} {there[name]!r}, this job's has {value!r}; "
                    "resume with the same dataset and settings, or start again in another folder"
                )

    def _start(self, pass_index: int) -> None:
        self.rewind()
        self.pass_index = pass_index
        self.cursor = 0
        self.ledger = SampleLedger()
        self._order = None
        self._dropped_at = None
        self._stream_end = None
        if self._stream is not None:
            self._stream.close()
            self._position = self._stream.origin()

    def _dataset_size(self) -> int:
        assert self._length is not None, "checked for map-style datasets"
        return self._length

    def _current_order(self) -> PassOrder:
        if self._order is None:
            size, options = self._dataset_size(), self.options
            permutation = drawn = None
            if options.sampler is not None:
                drawn = self._reader.draw(options.sampler, size, options.seed, self.pass_index)
            elif options.shuffle:
                permutation = self._reader.permutation(size, options.seed, self.pass_index)
            self._order = PassOrder(size, permutation, drawn)
        return self._order

    def _map_run(self, shape: _Shapes, first_step: int) -> _Run:
        issued: deque[MicroBatch] = deque()
        requests = self._issue(shape, first_step, issued)
        try:
            for batch in self._reader.read(requests):
                micro = issued.popleft()
                self._yielded += micro.is_last
                yield micro, batch
        finally:
            # The reader holds the requests, and those hold this object.
            requests.close()

    def _issue(self, shape: _Shapes, step: int, issued: deque[MicroBatch]) -> Generator[ReadRequest, None, None]:
        order, place = self._current_order(), self.cursor
        pass_seed = mix_seed(self.options.seed, self.pass_index)
        while place < order.size and self._dropped_at is None:
            asked = _ask(shape, step)
            total = min(asked.total, order.size - place)
            if total < asked.total and self.options.drop_last:
                self._dropped_at = place
                return
            waiting = _Step(total, [])
            self._steps.append(waiting)
            for micro, first, end in _micro_batches(step, asked, total, self.replica, self.num_replicas):
                indices = order.indices(place + first, place + end)
                if micro.samples:
                    waiting.own.append(indices)
                issued.append(micro)
                # A sampler may repeat a sample, which then needs other random numbers: its place is the key.
                keys = None if order.drawn is None else range(place + first, place + end)
                yield pass_seed, keys, indices.tolist()
            place += total
            step += 1

    def _stream_run(self, shape: _Shapes, first_step: int) -> _Run:
        issued: deque[MicroBatch] = deque()
        for batch in self._reader.ready(self._stream_batches(shape, first_step, issued)):
            micro = issued.popleft()
            self._yielded += micro.is_last
            yield micro, batch

    def _stream_batches(self, shape: _Shapes, step: int, issued: deque[MicroBatch]) -> Iterator[Any]:
        place, position = self.cursor, self._position
        while self._has_more(place):
            asked = _ask(shape, step)
            waiting = self._read_step(asked, place, position)
            if waiting is None:
                return
            for micro, first, end in _micro_batches(step, asked, waiting.total, self.replica, self.num_replicas):
                if micro.samples:
                    numbers = [number for number, _ in waiting.items[first:end]]
                    waiting.own.append(np.array(numbers, dtype=np.int64))
                issued.append(micro)
                yield self._reader.collate([item for _, item in waiting.items[first:end]])
            place += waiting.total
            assert waiting.position is not None
            position = waiting.position
            step += 1

    def _has_more(self, place: int) -> bool:
        assert self._stream is not None
        if place in (self._stream_end, self._dropped_at):
            return False
        if not self._stream.is_open:
            self._stream.open(self.pass_index, self._position)
        if not self._stream.is_empty():
            return True
        if place == 0:
            raise InvalidInput(f"the dataset {type(self.dataset).__name__} gave no items; a pass needs at least one")
        self._stream_end = self._stream_size = place
        return False

    def _read_step(self, asked: StepShape, place: int, position: StreamPosition) -> _Step | None:
        """Read a step; None where `drop_last` drops it."""
        assert self._stream is not None
        taken = self._stream.read_items(asked.total)
        end = place + len(taken.items)
        if taken.is_end:
            self._stream_end = self._stream_size = end
        if len(taken.items) < asked.total and self.options.drop_last:
            self._stream.put_back(taken.items)
            self._dropped_at = place
            return None
        numbers = np.array([number for number, _ in taken.items], dtype=np.int64)
        step = _Step(len(taken.items), [], taken.items, position.advanced(numbers, taken.mark))
        self._steps.append(step)
        return step
