"""Copies a job's state into reused host memory, and writes such a copy as plain DCP files.

Training waits while `HostBuffers` copies; `write_files` writes a copy as `torch.distributed.checkpoint` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from pollux.agent.checkpoint.manifest import FileDigest

__all__ = ["Abandoned", "HostBuffers", "StagedState", "StagedTensor", "pickled", "write_files"]


_LARGE_BYTES = 1 << 20


class Abandoned(Exception):
    """A save was told to stop before its end; its files are of no use."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """This replica's part of a tensor, on the host: it begins at `offsets` of the whole, whose shape is `size`."""

    host: Tensor
    size: torch.Size
    offsets: torch.Size
    sharded: bool


@dataclass(frozen=True, slots=True)
class StagedState:
    """A copy of a job's state: tensors by name, pickled objects, and for each tied name the name with its content."""

    tensors: Mapping[str, StagedTensor]
    objects: Mapping[str, bytes]
    tied: Mapping[str, str]


class HostBuffers:
    """Host memory for one copy of the state, which the next copy overwrites.

    There is a buffer for each name, replaced when shape or type change. Those for CUDA tensors are page-locked.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for tensors of these shapes and types, so that the first copy is as fast as the others.

        Tensors on the `meta` device can stand for state that does not exist yet.
        """
        for name, source in _first_names(tensors)[0].items():
            local = _local(source)
            if not self._fits(name, local):
                self._buffers[name] = _allocate(local).zero_()

    def stage(self, tensors: Mapping[str, Tensor], objects: Mapping[str, bytes] | None = None) -> StagedState:
        """Copy the tensors; returns when the caller may change them. Tied tensors are copied once."""
        sources, tied = _first_names(tensors)
        staged = {}
        devices = set()
        with torch.no_grad():
            for name, source in sources.items():
                local = _local(source)
                if not self._fits(name, local):
                    self._buffers[name] = _allocate(local)
                host = self._buffers[name]
                _copy(host, local)
                if local.is_cuda:
                    devices.add(local.device)
                staged[name] = _describe(source, host)
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            event.synchronize()
        for name in self._buffers.keys() - staged.keys():
            del self._buffers[name]
        return StagedState(staged, dict(objects or {}), tied)

    def _fits(self, name: str, local: Tensor) -> bool:
        buffer = self._buffers.get(name)
        return (
            buffer is not None
            and buffer.shape == local.shape
            and buffer.dtype == local.dtype
            and (buffer.is_pinned() or not local.is_cuda)
        )


def pickled(value: object) -> bytes:
    """`value` as `torch.save` writes it, which is how DCP stores what is not a tensor."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def write_files(
    folder: Path,
    state: StagedState,
    *,
    abandoned: threading.Event | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, FileDigest]:
    """Write `state` into `folder` as a DCP checkpoint; returns size and digest of the files this replica wrote.

    The digests are those of the data as it was passed to the file system. Nothing is flushed to disk. With `group` all
    its replicas write their parts together, through DCP's own collectives; without it there is no collective.
    """
    files = _DigestingFileSystem(abandoned or threading.Event())
    writer = _Writer(folder, state.tied, files)
    planner = _Planner(state)
    if group is None:
        _write_alone(writer, planner)
    else:
        _write_together(writer, planner, group)
    return files.digests


def _write_alone(writer: dcp.FileSystemWriter, planner: dcp.DefaultSavePlanner) -> None:
    # The steps of dcp.save for one process: they need no process group, and do not warn that there is none.
    planner.set_up_planner({}, storage_meta=writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _write_together(writer: dcp.FileSystemWriter, planner: dcp.DefaultSavePlanner, group: dist.ProcessGroup) -> None:
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as error:
        # DCP's error is no Exception, and its message is a page of tracebacks.
        replica, (problem, _) = min(error.failures.items())
        if isinstance(problem, Abandoned):
            raise Abandoned from None
        raise RuntimeError(f"replica {replica}: {type(problem).__name__}: {problem}") from None


def _first_names(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without repetitions, and for each repetition the name under which it came first."""
    first: dict[tuple[object, ...], str] = {}
    sources: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = _local(tensor)
        if local.device.type == "meta" or local.numel() == 0:
            sources[name] = tensor
            continue
        key = (local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), tensor.shape)
        known = first.setdefault(key, name)
        if known == name:
            sources[name] = tensor
        else:
            tied[name] = known
    return sources, tied


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _allocate(like: Tensor) -> Tensor:
    pinned = like.is_cuda or (like.device.type == "meta" and torch.cuda.is_available())
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def _copy(host: Tensor, local: Tensor) -> None:
    # With one thread torch's copy takes a quarter longer than that of the C library, which bypasses the caches.
    if local.is_cpu and local.is_contiguous() and local.nbytes >= _LARGE_BYTES and torch.get_num_threads() == 1:
        np.copyto(_bytes(host), _bytes(local))
    else:
        host.copy_(local, non_blocking=True)


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    return cast("np.ndarray[Any, Any]", tensor.view(-1).view(torch.uint8).numpy())


def _describe(source: Tensor, host: Tensor) -> StagedTensor:
    if not isinstance(source, DTensor):
        return StagedTensor(host, source.shape, torch.Size([0] * source.dim()), sharded=False)
    # DCP asks a distributed tensor for its place in the same way.
    chunk = cast(ChunkStorageMetadata, source.__create_chunk_list__()[0])
    return StagedTensor(host, source.shape, chunk.offsets, sharded=True)


class _Planner(dcp.DefaultSavePlanner):
    """Plans how to write a staged copy under its flat names."""

    def __init__(self, state: StagedState) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> SavePlan:
        items = [
            _tensor_item(name, staged)
            for name, staged in self._state.tensors.items()
            if (staged.host.numel() if staged.sharded else self.is_coordinator)
        ]
        if self.is_coordinator:
            items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._state.objects]
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        for name, first in self._state.tied.items():
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
        # DCP's conversion to a torch.save file makes nested state dicts of these, {"model": {"layer.weight": ...}}.
        metadata.planner_data = {name: tuple(name.split(".", 1)) for name in metadata.state_dict_metadata}
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._state.objects[name])
        return self._state.tensors[name].host


def _tensor_item(name: str, staged: StagedTensor) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, staged.offsets),
        type=WriteItemType.SHARD if staged.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(staged.offsets, staged.host.shape),
            properties=TensorProperties(dtype=staged.host.dtype),
            size=staged.size,
        ),
    )


class _Writer(dcp.FileSystemWriter):
    """DCP's writer with digests; the name of a tied tensor points to the tensor that was written."""

    def __init__(self, folder: Path, tied: Mapping[str, str], files: FileSystem) -> None:
        # Copying ahead is of use for tensors on a GPU, and waits for its stream; these tensors are on the host.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
        self.fs = files
        self._tied = tied

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for part in results for result in part]
        copies = [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=name))
            for name, first in self._tied.items()
            for result in written
            if result.index.fqn == first
        ]
        super().finish(metadata, [*results, copies])


class _DigestingFileSystem(FileSystem):
    """Local files whose digests are taken while they are written."""

    def __init__(self, abandoned: threading.Event) -> None:
        self.digests: dict[str, FileDigest] = {}
        self._abandoned = abandoned

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(cast(Any, mode)) as raw:
            stream = _DigestingStream(raw, self._abandoned)
            yield stream
            raw.flush()
        self.digests[Path(path).name] = FileDigest(stream.size, stream.checksum.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _DigestingStream(io.RawIOBase):
    def __init__(self, raw: io.BufferedIOBase, abandoned: threading.Event) -> None:
        super().__init__()
        self.checksum = hashlib.sha256()
        self.size = 0
        self._raw = raw
        self._abandoned = abandoned

    def write(self, data: Any) -> int:
        if self._abandoned.is_set():
            raise Abandoned
        self.checksum.update(data)
        self.size += memoryview(data).nbytes
        return self._raw.write(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        return self._raw.fileno()

    def writable(self) -> bool:
        return True
