"""The order of a pass over a map-style dataset, and seeds derived from a job's seed.

Both depend on (seed, pass) alone, never on the number of replicas or workers. The framework supplies the permutation
(PyTorch's is in `permutation`); `loader` shares the order between replicas.
"""

from __future__ import annotations

import numpy as np

from pollux.agent.data.ledger import Indices, SampleLedger
from pollux.core.errors import InvalidInput

__all__ = ["PassOrder", "ReadRequest", "mix_seed"]

_MASK = (1 << 64) - 1

ReadRequest = tuple[int, range | None, list[int]]
"""A batch to read: seed of the pass, keys of the samples' random numbers (None: their indices), indices."""


def mix_seed(*parts: int) -> int:
    """A 63-bit seed from several integers, mixed so that similar integers give unrelated seeds."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class PassOrder:
    """The order of one pass over a dataset of `size` samples, equal on all replicas.

    `permutation` is the framework's for this seed and pass; None: the samples in order. `drawn` has the indices that
    the user's sampler gave (maybe before a restart), which may be fewer, more or repeated.
    """

    __slots__ = ("_indices", "_whole", "drawn", "size")

    def __init__(self, size: int, permutation: Indices | None = None, drawn: Indices | None = None) -> None:
        self.drawn = drawn
        self._indices = permutation if drawn is None else drawn
        self.size = size if drawn is None else len(drawn)
        if drawn is not None:
            _check_drawn(drawn, size)

    def indices(self, first: int, end: int) -> Indices:
        """The samples at places `first` to `end` - 1 of the pass."""
        if self._indices is None:
            return np.arange(first, end, dtype=np.int64)
        return self._indices[first:end]

    def ledger(self, end: int) -> SampleLedger:
        """The ledger after committing the first `end` places."""
        if self._indices is None or (self.drawn is None and end == self.size):
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
