"""Reads data with PyTorch: worker processes, pinned memory, permutation, samplers, iterable datasets."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from pollux.agent.data.ledger import Indices
from pollux.agent.data.loader import Loader, LoaderOptions
from pollux.agent.data.order import ReadRequest, mix_seed
from pollux.agent.data.permutation import draw_indices, pass_order
from pollux.agent.data.sample_reader import SampleReader
from pollux.agent.data.stream import Stream, WorkerStart
from pollux.core.errors import InvalidInput

__all__ = ["TorchReader", "options_of", "torch_loader"]


def torch_loader(dataset: Any, options: LoaderOptions, replica: int, num_replicas: int) -> Loader:
    """A loader that reads a dataset with PyTorch."""
    return Loader(TorchReader(dataset, options), options, replica, num_replicas)


def options_of(loader: DataLoader[Any]) -> LoaderOptions:
    """The options of a user's `DataLoader`; the caller reads its `dataset` and `batch_size`.

    A random or distributed sampler becomes `shuffle`, with the seed of the loader's generator if it has one; any other
    sampler is kept.
    """
    _check_batching(loader)
    chosen: dict[str, Any] = {"shuffle": False}
    if not isinstance(loader.dataset, IterableDataset):
        chosen = _sampling(loader.sampler)
    if isinstance(loader.sampler, RandomSampler) and loader.generator is not None:
        chosen["seed"] = loader.generator.initial_seed() & (2**63 - 1)
    same = ("num_workers", "pin_memory", "drop_last", "worker_init_fn", "persistent_workers", "timeout")
    return LoaderOptions(
        collate_fn=loader.collate_fn,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        **{name: getattr(loader, name) for name in same},
        **chosen,
    )


def _check_batching(loader: DataLoader[Any]) -> None:
    if loader.batch_size is not None:
        return
    what = "batch_sampler" if loader.batch_sampler is not None else "batch_size=None"
    raise InvalidInput(
        f"the DataLoader was made with {what}, but Pollux forms the batches itself, of sizes that may change; "
        "make it with batch_size= and sampler= (one index per sample), or pass the dataset"
    )


def _sampling(sampler: Any) -> dict[str, Any]:
    if isinstance(sampler, SequentialSampler):
        return {"shuffle": False}
    if isinstance(sampler, DistributedSampler):
        return {"shuffle": sampler.shuffle, "seed": sampler.seed}
    is_random = isinstance(sampler, RandomSampler) and not sampler.replacement
    if is_random and sampler.num_samples == len(sampler.data_source):
        return {"shuffle": True}
    return {"shuffle": False, "sampler": sampler}


class _Requests:
    """The batch sampler of our one DataLoader: iterates over the requests that are set."""

    source: Iterator[ReadRequest] = iter(())

    def __iter__(self) -> Iterator[ReadRequest]:
        return self.source


class _Ready(IterableDataset[Any]):
    """Batches for a DataLoader that only pins their memory."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches


def _same(batch: Any) -> Any:
    return batch


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, RuntimeError):  # a dataset may have __len__ and not know its length
        return None


def _is_stream(dataset: Any, options: LoaderOptions) -> bool:
    """Whether the dataset is iterable only; refuses one that cannot be read."""
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        _check_stream(dataset, options)
        return True
    _check_map_style(dataset, options)
    return False


def _check_stream(dataset: Any, options: LoaderOptions) -> None:
    name = type(dataset).__name__
    if hasattr(dataset, "__next__"):
        raise InvalidInput(f"the dataset {name} is an iterator, which ends after one pass; give an iterable")
    if options.sampler is not None:
        raise InvalidInput(f"the dataset {name} is iterable, so a sampler has no meaning; leave sampler out")
    if options.num_shards is not None and options.num_workers not in (0, options.num_shards):
        raise InvalidInput(
            f"num_workers is {options.num_workers} and num_shards {options.num_shards}; an iterable dataset is "
            "read by one worker per shard or by none: make them equal, or num_workers=0"
        )


def _check_map_style(dataset: Any, options: LoaderOptions) -> None:
    name = type(dataset).__name__
    if isinstance(options.sampler, DistributedSampler):
        raise InvalidInput(
            "the sampler is a DistributedSampler, which gives one rank's part; Pollux shares the samples out itself: "
            "leave it out and set shuffle"
        )
    if not hasattr(dataset, "__getitem__") or _length(dataset) is None:
        raise InvalidInput(
            f"the dataset {name} has neither __getitem__ with __len__ nor __iter__; "
            "give a map-style dataset with a length, or an iterable one"
        )
    if _length(dataset) == 0:
        raise InvalidInput(f"the dataset {name} is empty (length 0); give one with samples")


class TorchReader:
    """Reads one dataset for a `Loader`; see `BatchReader`."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        self.dataset = dataset
        self._options = options
        self._collate = options.collate_fn or default_collate
        self._requests = _Requests()
        self._torch_loader: DataLoader[Any] | None = None
        self.stream = self._make_stream() if _is_stream(dataset, options) else None
        self.length = _length(dataset)

    def _make_stream(self) -> Stream:
        options = self._options
        shards = options.num_shards or max(1, options.num_workers)
        return Stream(self.dataset, options.seed, shards, options.num_workers > 0, self._worker_arguments())

    def _worker_arguments(self) -> dict[str, Any]:
        """The arguments of a `DataLoader` that only concern its workers."""
        options = self._options
        return {
            "worker_init_fn": WorkerStart(self.dataset, options.worker_init_fn),
            "prefetch_factor": options.prefetch_factor,
            "multiprocessing_context": options.multiprocessing_context,
            "timeout": options.timeout,
        }

    def permutation(self, size: int, seed: int, pass_index: int) -> Indices:
        """PyTorch's random permutation of the samples."""
        indices: Indices = pass_order(size, seed, pass_index).numpy()
        return indices

    def draw(self, sampler: Iterable[int], size: int, seed: int, pass_index: int) -> Indices:
        """The indices that a sampler gives for a pass."""
        return draw_indices(sampler, size, seed, pass_index)

    def to_saved(self, indices: Indices) -> Tensor:
        """Indices as a tensor, which a checkpoint can hold."""
        return torch.from_numpy(indices.copy())

    def read(self, requests: Generator[ReadRequest, None, None]) -> Iterator[Any]:
        """Batches from the one `DataLoader`, whose worker processes may stay from pass to pass."""
        self._requests.source = requests
        if self._torch_loader is None:
            self._torch_loader = self._make_torch_loader()
        return iter(self._torch_loader)

    def _make_torch_loader(self) -> DataLoader[Any]:
        options = self._options
        # A generator of its own, so that the base seed of the workers is not drawn from the user's.
        generator = torch.Generator()
        generator.manual_seed(mix_seed(options.seed))
        return DataLoader(
            SampleReader(self.dataset, self._collate),
            batch_sampler=self._requests,  # type: ignore[arg-type]  # passed on to SampleReader as it is
            num_workers=options.num_workers,
            collate_fn=_same,
            pin_memory=self._pins,
            persistent_workers=options.persistent_workers and options.num_workers > 0,
            generator=generator,
            **(self._worker_arguments() if options.num_workers else {}),
        )

    @property
    def _pins(self) -> bool:
        return self._options.pin_memory and torch.accelerator.is_available()

    def collate(self, items: list[Any]) -> Any:
        """A batch of items of a stream."""
        return self._collate(items)

    def ready(self, batches: Iterator[Any]) -> Iterable[Any]:
        """The batches in pinned memory, where the options say so."""
        if not self._pins:
            return batches
        return DataLoader(
            _Ready(batches), batch_size=None, collate_fn=_same, pin_memory=True, generator=torch.Generator()
        )

    def again(self) -> TorchReader:
        """Another reader, with workers of its own."""
        return TorchReader(self.dataset, self._options)

    def end_workers(self) -> None:
        """End worker processes, persistent ones too."""
        self._torch_loader = None
