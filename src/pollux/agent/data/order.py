"""The order in which a pass visits a map-style dataset, and reading its samples with random numbers of their own.

Both follow from (seed, pass) alone, never from the number of replicas or workers. Who takes which part is in `loader`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from pollux.agent.data.ledger import Indices, SampleLedger
from pollux.core.errors import InvalidInput

__all__ = [
    "PassOrder",
    "RandomState",
    "ReadRequest",
    "SampleReader",
    "isolated_random",
    "mix_seed",
    "pass_order",
    "seed_random",
]

_MASK = (1 << 64) - 1
# A sampler that goes on for ever would fill the memory before anybody noticed.
_MOST_REPEATS = 100


def mix_seed(*parts: int) -> int:
    """A 63-bit seed from several integers, well mixed, so that neighbouring ones share nothing."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_random(seed: int) -> None:
    """Seed the CPU generators that datasets draw from: torch's default one, `random` and `numpy.random`.

    Devices keep theirs: `torch.manual_seed` would reset those too.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _numpy_words() -> bytes:
    """The words of numpy's global Mersenne twister: `get_state` would take 40 µs, for every batch."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # the stubs forgot it
    if isinstance(generator, np.random.MT19937):
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    return repr(generator.state).encode()


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of the three CPU generators at one moment; cheap enough to take around every batch (about 15 µs)."""

    torch_state: torch.Tensor
    python_state: tuple[Any, ...]
    numpy_words: bytes

    @classmethod
    def now(cls) -> RandomState:
        """The present state."""
        return cls(torch.default_generator.get_state(), random.getstate(), _numpy_words())

    def has_moved(self) -> bool:
        """Whether anything was drawn or seeded since."""
        return (
            self.numpy_words != _numpy_words()
            or not torch.equal(self.torch_state, torch.default_generator.get_state())
            or self.python_state != random.getstate()
        )

    def restore(self) -> None:
        """Go back to it; numpy's cached second normal variate, if there was one, is lost."""
        torch.default_generator.set_state(self.torch_state)
        random.setstate(self.python_state)
        if self.numpy_words != _numpy_words() and len(self.numpy_words) == 625 * 4:
            words = np.frombuffer(self.numpy_words, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:624], int(words[624]), 0, 0.0))


@contextlib.contextmanager
def isolated_random() -> Iterator[None]:
    """Leave the CPU generators afterwards as they were before, whatever is seeded and drawn inside."""
    torch_state, python_state = torch.default_generator.get_state(), random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def pass_order(size: int, seed: int, pass_index: int, shuffle: bool = True) -> torch.Tensor:
    """The indices of a pass in the order in which its samples are taken, as an int64 tensor.

    Plain PyTorch that takes them in this order, batch by batch, sees what an exact job sees.
    """
    if not shuffle:
        return torch.arange(size)
    generator = torch.Generator()
    generator.manual_seed(mix_seed(seed, pass_index))
    return torch.randperm(size, generator=generator)


def _draw(sampler: Iterable[Any], size: int, seed: int, pass_index: int) -> Indices:
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(pass_index)
    own = getattr(sampler, "generator", None)
    limit = _MOST_REPEATS * (size + 10_000)
    with isolated_random(), _seeded_generator(own, mix_seed(seed, pass_index)):
        seed_random(mix_seed(seed, pass_index))
        try:
            drawn = np.fromiter(map(operator.index, itertools.islice(sampler, limit + 1)), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"the sampler {type(sampler).__name__} gave something that is not an index ({error}); "
                "it must give one integer per sample, batches are formed by Pollux"
            ) from error
    if len(drawn) > limit:
        raise InvalidInput(
            f"the sampler {type(sampler).__name__} gave more than {limit} indices for a dataset of {size} samples; "
            "a pass must end: give a sampler with a finite number of indices"
        )
    return drawn


@contextlib.contextmanager
def _seeded_generator(generator: object, seed: int) -> Iterator[None]:
    """A sampler's own generator may differ between replicas: seed it for the draw."""
    if not isinstance(generator, torch.Generator):
        yield
        return
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class PassOrder:
    """The order of one pass over a dataset of `size` samples, made once and the same on every replica.

    `drawn` holds what a custom sampler gave (or gave before a restart), and is None otherwise.
    """

    __slots__ = ("_indices", "_whole", "drawn", "size")

    def __init__(self, size: int, seed: int, pass_index: int, shuffle: bool, drawn: Indices | None = None) -> None:
        self._whole = drawn is None
        self.drawn = drawn
        self._indices: Indices | None = drawn
        if drawn is None and shuffle:
            self._indices = pass_order(size, seed, pass_index).numpy()
        self.size = size if drawn is None else len(drawn)
        if drawn is not None:
            _check_drawn(drawn, size)

    @classmethod
    def from_sampler(cls, sampler: Iterable[Any], size: int, seed: int, pass_index: int) -> PassOrder:
        """Draw a pass from a custom sampler, with all generators seeded from (seed, pass) and put back afterwards.

        The pass is what the sampler gives: fewer, more or repeated indices of the `size` samples are right.
        """
        return cls(size, seed, pass_index, shuffle=False, drawn=_draw(sampler, size, seed, pass_index))

    def indices(self, first: int, end: int) -> Indices:
        """The samples at places `first` to `end` - 1 of the pass."""
        if self._indices is None:
            return np.arange(first, end, dtype=np.int64)
        return self._indices[first:end]

    def ledger(self, end: int) -> SampleLedger:
        """What committing the first `end` places must leave."""
        if self._indices is None or (self._whole and end == self.size):
            return SampleLedger.of_range(end)
        return SampleLedger.of(self._indices[:end])


def _check_drawn(drawn: Indices, size: int) -> None:
    if len(drawn) == 0:
        raise InvalidInput("the sampler gave no index at all; a pass needs at least one sample")
    low, high = int(drawn.min()), int(drawn.max())
    if low < 0 or high >= size:
        raise InvalidInput(
            f"the sampler gave index {low if low < 0 else high}, outside of the dataset's 0 to {size - 1}; "
            "give indices of this dataset"
        )


ReadRequest = tuple[int, range | None, list[int]]
"""A batch to read: seed of the pass, what tells the samples' random numbers apart (None: the indices), indices."""


class SampleReader(Dataset[Any]):
    """A map-style dataset as workers see it: a request in, a collated batch out.

    Where reading draws random numbers, each sample is read with its own, seeded from (seed, pass, sample), so that
    it comes out the same at any number of replicas and workers. Whether it draws is seen from the generators.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self.collate = collate
        self.draws = False
        inner = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        self.never_draws = type(inner) is TensorDataset and collate is default_collate

    def __getitems__(self, request: ReadRequest) -> Any:
        """The batch that was asked for, collated."""
        pass_seed, keys, indices = request
        if self.never_draws:
            return self.collate(self._read(indices))
        if not self.draws:
            before = RandomState.now()
            batch = self.collate(self._read(indices))
            if not before.has_moved():
                return batch
            before.restore()
            self.draws = True
        return self._seeded(pass_seed, indices if keys is None else keys, indices)

    def _read(self, indices: list[int]) -> Any:
        read_many = getattr(self.dataset, "__getitems__", None)
        if read_many is not None:
            return read_many(indices)
        dataset = self.dataset
        return [dataset[index] for index in indices]

    def _seeded(self, pass_seed: int, keys: Sequence[int], indices: list[int]) -> Any:
        samples: Any = []
        with isolated_random():
            for key, index in zip(keys, indices, strict=True):
                seed_random(mix_seed(pass_seed, key))
                one = self._read([index])
                if not isinstance(one, list):
                    # A `__getitems__` that makes the batch itself can only be asked for the whole.
                    samples = self._read(indices)
                    break
                samples += one
            # A collate function that draws (masking, mixing) is repeatable for the same samples, not across splits.
            seed_random(mix_seed(pass_seed, -1, keys[0]))
            return self.collate(samples)
