"""What a framework supplies so that a loader can read a dataset."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

from pollux.agent.data.ledger import Indices
from pollux.agent.data.order import ReadRequest
from pollux.agent.data.stream_position import ItemStream

__all__ = ["BatchReader"]


class BatchReader(Protocol):
    """Reads one dataset: the order of its samples, and batches of them.

    `length` is that of a map-style dataset, or what a stream says of itself; `stream` is None for a map-style dataset.
    """

    @property
    def dataset(self) -> Any:
        """The user's dataset."""

    @property
    def length(self) -> int | None:
        """How many samples the dataset has; None: not known."""

    @property
    def stream(self) -> ItemStream | None:
        """The dataset as a stream of items, where it can only be iterated."""

    def permutation(self, size: int, seed: int, pass_index: int) -> Indices:
        """The order of a shuffled pass; it must follow from these numbers alone."""

    def draw(self, sampler: Iterable[int], size: int, seed: int, pass_index: int) -> Indices:
        """What a sampler of the user's gives for a pass."""

    def to_saved(self, indices: Indices) -> Any:
        """Indices in the form in which the framework's checkpoints hold arrays; `numpy.asarray` must read it."""

    def read(self, requests: Generator[ReadRequest, None, None]) -> Iterator[Any]:
        """A batch for each request, in their order; requests may be taken ahead of the batches."""

    def collate(self, items: list[Any]) -> Any:
        """A batch of items of a stream."""

    def ready(self, batches: Iterator[Any]) -> Iterable[Any]:
        """The same batches, brought to where the device reads them fast."""

    def again(self) -> BatchReader:
        """Another reader of the same data, which reads independently of this one."""

    def end_workers(self) -> None:
        """End worker processes, if there are any."""
