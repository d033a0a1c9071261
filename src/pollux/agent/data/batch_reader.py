"""The interface by which a framework reads a dataset for the loader."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any, Protocol

from pollux.agent.data.ledger import Indices
from pollux.agent.data.order import ReadRequest
from pollux.agent.data.stream_position import ItemStream

__all__ = ["BatchReader"]


class BatchReader(Protocol):
    """Reads one dataset: the order of its samples, and batches of them.

    `length` is that of a map-style dataset, or the `__len__` of a stream; `stream` is None for a map-style dataset.
    """

    @property
    def dataset(self) -> Any:
        """The user's dataset."""

    @property
    def length(self) -> int | None:
        """The number of samples of the dataset; None: not known."""

    @property
    def stream(self) -> ItemStream | None:
        """The dataset as a stream of items where it is iterable only, else None."""

    def permutation(self, size: int, seed: int, pass_index: int) -> Indices:
        """The order of a shuffled pass, which must depend on these numbers alone."""

    def draw(self, sampler: Iterable[int], size: int, seed: int, pass_index: int) -> Indices:
        """The indices that the user's sampler gives for a pass."""

    def to_saved(self, indices: Indices) -> Any:
        """Indices as an array of the framework, for its checkpoints; `numpy.asarray` must be able to read it."""

    def read(self, requests: Generator[ReadRequest, None, None]) -> Iterator[Any]:
        """A batch for each request, in order; it may draw requests before their batches are due."""

    def collate(self, items: list[Any]) -> Any:
        """A batch of items of a stream."""

    def ready(self, batches: Iterator[Any]) -> Iterable[Any]:
        """The same batches in memory that the device reads fast."""

    def again(self) -> BatchReader:
        """Another, independent reader of the same data."""

    def end_workers(self) -> None:
        """End the worker processes, if there are any."""
