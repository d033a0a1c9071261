"""Reads a checkpoint, and fills a job's tensors from it.

Each replica reads its own part, whatever the number of replicas that wrote it. All is checked before anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pollux.agent.checkpoint.manifest import JSON, Manifest, read_manifest, require_same_signature, verify_files
from pollux.agent.checkpoint.state import State
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch

__all__ = ["Saved", "load", "parameter_signature", "read_saved", "tensor_layout"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint on disk: its folder, and its manifest."""

    path: Path
    manifest: Manifest


def parameter_signature(tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Names, shapes and types as an entry of a signature: `{"parameter": {"layer.weight": "[10, 32] float32"}}`."""
    return {"parameter": {name: _shape_text(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}}


def read_saved(folder: Path) -> Saved:
    """The checkpoint in `folder`, after all its checksums were verified; `CheckpointDamaged` where one is wrong."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    return Saved(folder, manifest)


def tensor_layout(saved: Saved) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor of a checkpoint by name, whole even where it was written in shards."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in _metadata(saved)[1].state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load(
    saved: Saved,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    signature: Mapping[str, JSON] | None = None,
) -> State:
    """Fill `tensors` in place and return the rest; each replica calls it for itself, and does not wait for others.

    Distributed tensors read their own shards, whatever the number of replicas that wrote them. The returned tensors are
    those of the checkpoint that were not passed: new, whole and on the host. Objects are unpickled: `saved` must come
    from `Checkpointer.latest` or `read_saved`, and its writer must be allowed to run code here. Where `signature` or a
    tensor does not fit, `CheckpointMismatch` names the first difference, before anything is changed.
    """
    if signature is not None:
        require_same_signature(saved.manifest.signature, signature)
    reader, metadata = _metadata(saved)
    given = dict(tensors or {})
    for name, tensor in given.items():
        _require_fitting(name, tensor, metadata.state_dict_metadata.get(name))
    wanted: dict[str, Any] = {**given, **_places_for_rest(saved, metadata, given)}
    _read(reader, metadata, wanted)
    _restore_tied(saved, given, wanted)
    rest = {name: value for name, value in wanted.items() if name not in given}
    return State(
        tensors={name: value for name, value in rest.items() if _is_tensor(metadata, name)},
        objects={name: value for name, value in rest.items() if not _is_tensor(metadata, name)},
        values=dict(saved.manifest.values),
    )


def _places_for_rest(saved: Saved, metadata: Metadata, given: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """What to read beside the tensors that were passed: all objects, and new tensors for all others."""
    places: dict[str, Tensor | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            places[name] = None
        elif name not in given and saved.manifest.tied.get(name, name) == name:
            places[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return places


def _shape_text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _is_tensor(metadata: Metadata, name: str) -> bool:
    return isinstance(metadata.state_dict_metadata.get(name), TensorStorageMetadata)


def _require_fitting(name: str, tensor: Tensor, entry: object) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        raise CheckpointMismatch(f"tensor {name} is not in the checkpoint; load it into the job that wrote it")
    inside, outside = _shape_text(entry.size, entry.properties.dtype), _shape_text(tensor.shape, tensor.dtype)
    if inside != outside:
        raise CheckpointMismatch(
            f"tensor {name} is {inside} in the checkpoint, {outside} in the job; load it into the job that wrote it"
        )


def _metadata(saved: Saved) -> tuple[dcp.FileSystemReader, Metadata]:
    reader = dcp.FileSystemReader(saved.path)
    try:
        return reader, reader.read_metadata()
    except OSError as error:
        raise CheckpointDamaged(
            f"{saved.path}: {error.strerror or error}; every replica must see the folder that replica 0 wrote"
        ) from error


def _read(reader: dcp.FileSystemReader, metadata: Metadata, wanted: dict[str, Any]) -> None:
    # The steps of dcp.load for one process: each replica reads its own part, without a collective.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([local]))[0])
    with torch.no_grad():
        reader.read_data(plan, planner).wait()


def _restore_tied(saved: Saved, given: Mapping[str, Tensor], wanted: dict[str, Any]) -> None:
    """Let new tensors share their content as they did when they were saved; one tied to a passed tensor is a copy."""
    for name, first in saved.manifest.tied.items():
        if name not in given:
            wanted[name] = given[first].detach().clone() if first in given else wanted[first]
