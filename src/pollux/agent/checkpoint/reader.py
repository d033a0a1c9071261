"""Reading a checkpoint: what it is, what it holds, and how a job's own tensors are filled from it.

Each replica reads its own part, whatever the number of replicas that wrote it; nothing is changed before all fits.
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
from pollux.core.errors import CheckpointDamaged, CheckpointMismatch

__all__ = ["Loaded", "Saved", "load", "parameter_signature", "read_saved", "saved_at", "tensor_layout"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint on disk: where, of which step, and what its manifest says.

    `created` is UTC in ISO 8601; `values` and `signature` are those passed to `Checkpointer.save`; `tied` maps the
    name of a tensor that shares another's content to that other name.
    """

    path: Path
    step: int
    num_replicas: int
    created: str
    values: Mapping[str, JSON]
    signature: Mapping[str, JSON]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint held beyond the tensors that were filled in place.

    `tensors` are those the caller did not pass, whole and on the host; `objects` and `values` are those of `save`.
    """

    tensors: dict[str, Tensor]
    objects: dict[str, object]
    values: Mapping[str, JSON]


def parameter_signature(tensors: Mapping[str, Tensor]) -> dict[str, JSON]:
    """Names, shapes and types as an entry of a signature: `{"parameter": {"layer.weight": "[10, 32] float32"}}`."""
    return {"parameter": {name: _shape_text(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}}


def read_saved(folder: Path) -> Saved:
    """The checkpoint in `folder`, after all its checksums were verified; `CheckpointDamaged` where one is wrong."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest.files)
    return saved_at(folder, manifest)


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
) -> Loaded:
    """Fill `tensors` in place and return the rest; every replica calls it for its own, and none waits for another.

    Distributed tensors read their own shards, whatever the number of replicas that wrote them. Tensors of the
    checkpoint that are not passed come back new. Objects are unpickled: `saved` must come from `Checkpointer.latest`
    or `read_saved`, and from somebody who may run code here. Raises `CheckpointMismatch`
    naming the first difference, before anything is changed, where `signature` or a tensor does not fit.
    """
    if signature is not None:
        require_same_signature(saved.signature, signature)
    reader, metadata = _metadata(saved)
    given = dict(tensors or {})
    for name, tensor in given.items():
        _require_fitting(name, tensor, metadata.state_dict_metadata.get(name))
    wanted: dict[str, Any] = {**given, **_places_for_rest(saved, metadata, given)}
    _read(reader, metadata, wanted)
    _restore_tied(saved, given, wanted)
    rest = {name: value for name, value in wanted.items() if name not in given}
    return Loaded(
        tensors={name: value for name, value in rest.items() if _is_tensor(metadata, name)},
        objects={name: value for name, value in rest.items() if not _is_tensor(metadata, name)},
        values=saved.values,
    )


def _places_for_rest(saved: Saved, metadata: Metadata, given: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """What is read beside the tensors that were given: all objects, and all other tensors."""
    places: dict[str, Tensor | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            places[name] = None
        elif name not in given and saved.tied.get(name, name) == name:
            places[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return places


def saved_at(path: Path, manifest: Manifest) -> Saved:
    """The checkpoint there, by its manifest."""
    return Saved(
        path=path,
        step=manifest.step,
        num_replicas=manifest.num_replicas,
        created=manifest.created,
        values=manifest.values,
        signature=manifest.signature,
        tied=manifest.tied,
    )


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
    # The steps of dcp.load for one process: each replica reads its own, so no collective is needed.
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([local]))[0])
    with torch.no_grad():
        reader.read_data(plan, planner).wait()


def _restore_tied(saved: Saved, given: Mapping[str, Tensor], wanted: dict[str, Any]) -> None:
    """New tensors that shared their content when saved share it again; with the caller's, they are copies."""
    for name, first in saved.tied.items():
        if name not in given:
            wanted[name] = given[first].detach().clone() if first in given else wanted[first]
