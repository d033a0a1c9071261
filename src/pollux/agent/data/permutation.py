"""PyTorch's order of a pass: a random permutation, or the indices of the user's sampler."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from pollux.agent.data.ledger import Indices
from pollux.agent.data.order import mix_seed
from pollux.agent.data.random_numbers import isolated_random, seed_random
from pollux.core.errors import InvalidInput

__all__ = ["draw_indices", "pass_order"]

# A sampler that never ends would fill the memory.
_MOST_REPEATS = 100


def pass_order(size: int, seed: int, pass_index: int, shuffle: bool = True) -> torch.Tensor:
    """The indices of a pass in the order in which samples are used, as an int64 tensor.

    A plain PyTorch loop that reads batches in this order sees the batches of an exact job.
    """
    if not shuffle:
        return torch.arange(size)
    generator = torch.Generator()
    generator.manual_seed(mix_seed(seed, pass_index))
    return torch.randperm(size, generator=generator)


def draw_indices(sampler: Iterable[Any], size: int, seed: int, pass_index: int) -> Indices:
    """The indices that a sampler gives for a pass, with all generators seeded from (seed, pass) and restored after it.

    They may be fewer than the `size` samples, more, or repeated.
    """
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
    """Seed a sampler's own generator, which may differ between replicas, and restore it afterwards."""
    if not isinstance(generator, torch.Generator):
        yield
        return
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)
