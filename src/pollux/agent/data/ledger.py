"""The committed samples of a pass, as a count and a hash that does not depend on their order.

The caller sums the parts of the replicas, an all-reduce of two integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Indices", "SampleLedger", "hash_indices"]

Indices = npt.NDArray[np.int64]
"""Indices of samples, or running numbers of a stream's items."""

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20
_MOST_PENDING = 64


def hash_indices(indices: Indices) -> int:
    """The sum modulo 2^64 of a mixed 64-bit hash of each index (the finaliser of splitmix64).

    A sample that is missing, extra or replaced changes the sum, except with probability 2^-64.
    """
    total = 0
    for first in range(0, len(indices), _CHUNK):
        x = indices[first : first + _CHUNK].astype(np.uint64)
        x += np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        total += int(np.add.reduce(x))
    return total & _MASK


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


class SampleLedger:
    """Count and hash of the samples of one pass: a part merged over all replicas, and a local part since then.

    `count` and `digest` cover both parts, so a single replica need not merge.
    """

    __slots__ = ("_local", "_merged", "_offered", "_pending")

    def __init__(self) -> None:
        self._merged = (0, 0)
        self._local = (0, 0)
        self._offered: tuple[int, int] | None = None
        # Hashing a few hundred indices is mostly call overhead, so several steps are hashed at once.
        self._pending: list[Indices] = []

    @classmethod
    def of_range(cls, size: int) -> SampleLedger:
        """The ledger after a pass over the samples 0 to `size` - 1."""
        ledger = cls()
        for first in range(0, size, _CHUNK):
            ledger.add(np.arange(first, min(size, first + _CHUNK), dtype=np.int64))
            ledger._hash_pending()
        return ledger

    @classmethod
    def of(cls, indices: Indices) -> SampleLedger:
        """The ledger after a pass over these samples; a repeated sample counts as often as it occurs."""
        ledger = cls()
        ledger.add(indices)
        return ledger

    def add(self, indices: Indices) -> None:
        """Add samples that this replica has committed; the array must not change afterwards."""
        self._pending.append(indices)
        if len(self._pending) >= _MOST_PENDING:
            self._hash_pending()

    def merge(self, count: int, digest: int) -> None:
        """Add a count and a hash over all replicas to the merged part."""
        self._merged = (self._merged[0] + count, (self._merged[1] + digest) & _MASK)

    def local_part(self) -> tuple[int, int]:
        """Count and hash of the local part.

        The hash is a signed 64-bit integer, so that an all-reduced sum of int64 tensors wraps around as it should.
        """
        self._hash_pending()
        self._offered = self._local
        return self._local[0], _signed(self._local[1])

    def absorb(self, count: int, digest: int) -> None:
        """Add the sum of all replicas' `local_part()` to the merged part, and remove it from the local part.

        Samples added since the call of `local_part()` stay local, so training may go on during the exchange.
        """
        self._hash_pending()
        self.merge(count, digest)
        gone = self._local if self._offered is None else self._offered
        self._local = (self._local[0] - gone[0], (self._local[1] - gone[1]) & _MASK)
        self._offered = None

    @property
    def merged_count(self) -> int:
        """Samples of the merged part, which is equal on all replicas."""
        return self._merged[0]

    @property
    def count(self) -> int:
        """Samples of both parts."""
        self._hash_pending()
        return self._merged[0] + self._local[0]

    @property
    def digest(self) -> int:
        """Hash of both parts, from 0 to 2^64 - 1."""
        self._hash_pending()
        return (self._merged[1] + self._local[1]) & _MASK

    def state_dict(self) -> dict[str, int]:
        """The merged part as plain integers, equal on all replicas; the hash is signed, to fit an int64."""
        return {"count": self._merged[0], "digest": _signed(self._merged[1])}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SampleLedger:
        """The ledger of a `state_dict()`."""
        ledger = cls()
        ledger.merge(int(state["count"]), int(state["digest"]))
        return ledger

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SampleLedger):
            return NotImplemented
        return (self.count, self.digest) == (other.count, other.digest)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"SampleLedger(count={self.count}, digest={self.digest:#018x})"

    def _hash_pending(self) -> None:
        if self._pending:
            indices = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
            self._pending.clear()
            self._local = (self._local[0] + len(indices), (self._local[1] + hash_indices(indices)) & _MASK)
