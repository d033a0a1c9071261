"""Reads the samples of a map-style dataset, each with random numbers of its own where reading draws any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from pollux.agent.data.order import ReadRequest, mix_seed
from pollux.agent.data.random_numbers import RandomState, isolated_random, seed_random

__all__ = ["SampleReader"]


class SampleReader(Dataset[Any]):
    """A map-style dataset for workers: it answers a request with a collated batch.

    If reading draws random numbers (the generators show that), each sample has its own, seeded from (seed, pass,
    sample). So a sample is the same at any number of replicas and workers.
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
        """The collated batch of a request."""
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
                    # This `__getitems__` makes the batch itself, so it must get all indices.
                    samples = self._read(indices)
                    break
                samples += one
            # A collate function that draws (masking, mixing) draws the same for the same samples, not for other splits.
            seed_random(mix_seed(pass_seed, -1, keys[0]))
            return self.collate(samples)
