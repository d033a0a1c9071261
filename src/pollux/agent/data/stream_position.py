"""Positions in a stream of items, from which reading can resume; `stream` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pollux.agent.data.ledger import Indices, SampleLedger

__all__ = ["Item", "ItemStream", "StreamItems", "StreamPosition"]

Item = tuple[int, Any]
"""A stream's item with its running number: place in its shard × number of shards + shard."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in a stream: the items read of each shard, and a state of the dataset from which to seek.

    `dataset_state` is the dataset's own after `state_after` items of the pass, at or before this position; None: none.
    """

    shards: tuple[int, ...]
    dataset_state: Any = None
    state_after: int = 0

    def advanced(self, numbers: Indices, mark: Any) -> StreamPosition:
        """The position after items with these numbers; `mark` is the dataset's state there, None where not known."""
        shards = list(self.shards)
        for shard, count in enumerate(np.bincount(numbers % len(shards), minlength=len(shards))):
            shards[shard] += int(count)
        if mark is None:
            return StreamPosition(tuple(shards), self.dataset_state, self.state_after)
        return StreamPosition(tuple(shards), mark, sum(shards))

    def ledger(self) -> SampleLedger:
        """The ledger after committing all items before this position."""
        ledger = SampleLedger()
        for shard, count in enumerate(self.shards):
            ledger.add(np.arange(count, dtype=np.int64) * len(self.shards) + shard)
        return ledger


@dataclass(frozen=True, slots=True)
class StreamItems:
    """Items of one step; `mark` is the dataset's state after them, None where it has none or was read further."""

    items: list[Item]
    mark: Any
    is_end: bool


class ItemStream(Protocol):
    """An iterable dataset as the loader reads it: item by item, in an order that is the same on every replica."""

    @property
    def num_shards(self) -> int:
        """The virtual shards of the dataset, fixed for the life of a job."""

    @property
    def is_open(self) -> bool:
        """Whether a pass is being read."""

    def origin(self) -> StreamPosition:
        """The position at the start of a pass."""

    def open(self, pass_index: int, position: StreamPosition) -> None:
        """Start to read a pass from a position."""

    def read_items(self, count: int) -> StreamItems:
        """The next `count` items, fewer at the end."""

    def is_empty(self) -> bool:
        """Whether no item is left."""

    def put_back(self, items: Sequence[Item]) -> None:
        """Put back the items that were read last, to be read again."""

    def close(self) -> None:
        """Stop reading."""
