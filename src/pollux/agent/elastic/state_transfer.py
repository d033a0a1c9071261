"""Sends a job's state from the memory of some replicas to that of others: a manifest as JSON, tensors as bytes.

There is no pickle and no file. `generation_move` decides which replicas send and receive.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.agent.checkpoint.state import State
from pollux.agent.distributed.byte_collectives import broadcast_bytes
from pollux.agent.elastic.state_codec import decode, encode
from pollux.core.errors import CheckpointMismatch, PolluxError

__all__ = ["Packed", "Piece", "Segment", "cut", "exchange", "pack", "share_out"]

_PIECE_BYTES = 4 << 20
_MOST_PIECES = 64
_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """A state to send: its manifest, and the tensors that the manifest numbers, not copied."""

    manifest: str
    tensors: tuple[Tensor, ...]


def pack(state: State) -> Packed:
    """The state as manifest and tensors, not copied; `InvalidInput` for a value that only pickle could carry."""
    tensors: list[Tensor] = []
    numbers: dict[tuple[Any, ...], int] = {}
    names: dict[str, int] = {}
    # By name, so that all senders number the tensors alike; the order in their optimisers may differ.
    for name, tensor in sorted(state.tensors.items()):
        # Tied weights have several names for one memory.
        key = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device)
        number = numbers.get(key) if tensor.numel() else None
        if number is None:
            encode(tensor, tensors, name)
            number = numbers[key] = len(tensors) - 1
        names[name] = number
    objects = {name: encode(value, tensors, name) for name, value in state.objects.items()}
    layout = [[_dtype_name(each.dtype), list(each.shape), each.is_cuda] for each in tensors]
    manifest = {"names": names, "layout": layout, "objects": objects, "values": state.values}
    return Packed(json.dumps(manifest), tuple(tensor.detach() for tensor in tensors))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes `first` to `end` - 1 of tensor number `tensor`."""

    tensor: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit of transfer: parts of successive tensors on the same kind of device."""

    segments: tuple[Segment, ...]
    on_gpu: bool

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return sum(segment.end - segment.first for segment in self.segments)


def cut(sizes: Sequence[int], on_gpu: Sequence[bool], piece_bytes: int | None = None) -> list[Piece]:
    """Tensors of these sizes in bytes as pieces of at most `piece_bytes`, by default large enough that there are few.

    Small tensors share a piece, large ones are cut; every byte is in exactly one.
    """
    limit = piece_bytes or max(_PIECE_BYTES, -(-sum(sizes) // _MOST_PIECES))
    # A multiple of every element's size, so that no element is cut.
    limit = max(16, limit // 16 * 16)
    pieces: list[Piece] = []
    for kind in sorted(set(on_gpu)):
        waiting: list[Segment] = []
        room = limit
        for number, size in enumerate(sizes):
            first = 0
            while on_gpu[number] == kind and first < size:
                end = min(size, first + room)
                waiting.append(Segment(number, first, end))
                room -= end - first
                first = end
                if room == 0:
                    pieces.append(Piece(tuple(waiting), kind))
                    waiting, room = [], limit
        if waiting:
            pieces.append(Piece(tuple(waiting), kind))
    return pieces


def share_out(pieces: Sequence[Piece], num_senders: int) -> list[int]:
    """The sender of each piece, from 0: successive pieces, with about as many bytes for each sender."""
    total = sum(piece.num_bytes for piece in pieces) or 1
    senders, before = [], 0
    for piece in pieces:
        middle = before + piece.num_bytes / 2
        senders.append(min(int(middle * num_senders / total), num_senders - 1))
        before += piece.num_bytes
    return senders


def exchange(
    packed: Packed | None,
    senders: Sequence[int],
    receivers: Sequence[int],
    group: dist.ProcessGroup | None,
    into: Mapping[str, Tensor] | None = None,
) -> tuple[State, int]:
    """The senders' state on every receiver, and the bytes of its tensors; a collective over all ranks of `group`.

    `group` must carry CPU tensors; CUDA tensors go through the default group where that is NCCL, else through the host.
    Senders hold the same state, and each sends a share of it. All ranks get the manifest of `senders[0]`; one that does
    not receive gets the values, without tensors. Receivers get the tensors named in `into` in place. Where a checksum
    differs, all ranks raise `PolluxError`.
    """
    rank = dist.get_rank()
    mine = b"" if packed is None else packed.manifest.encode()
    manifest = json.loads(broadcast_bytes(mine, senders[0], group))
    if not receivers:
        return State(values=manifest["values"]), 0
    layout = [(getattr(torch, name), tuple(shape)) for name, shape, _ in manifest["layout"]]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in layout]
    pieces, owners = _shared(manifest, sizes, senders)
    if rank in receivers:
        tensors = _targets(manifest, layout, into or {})
        sums = _receive(tensors, pieces, owners, group)
        _compare(sums, senders, receivers, group)
        return _unpacked(manifest, tensors), sum(sizes)
    sums = {} if packed is None else _send(packed.tensors, pieces, owners, receivers, group)
    _compare(sums, senders, receivers, group)
    return State(values=manifest["values"]), sum(sizes)


def _unpacked(manifest: Mapping[str, Any], tensors: Sequence[Tensor]) -> State:
    named = {name: tensors[number] for name, number in manifest["names"].items()}
    objects = {name: decode(value, tensors) for name, value in manifest["objects"].items()}
    return State(named, objects, manifest["values"])


def _shared(manifest: Mapping[str, Any], sizes: Sequence[int], senders: Sequence[int]) -> tuple[list[Piece], list[int]]:
    """The pieces, and the rank that sends each. The first sender alone sends tensors inside objects."""
    on_gpu = [each for _, _, each in manifest["layout"]]
    named = len(set(manifest["names"].values()))
    pieces = cut(sizes[:named], on_gpu[:named])
    owners = [senders[index] for index in share_out(pieces, len(senders))]
    others = [
        Piece(tuple(Segment(each.tensor + named, each.first, each.end) for each in piece.segments), piece.on_gpu)
        for piece in cut(sizes[named:], on_gpu[named:])
    ]
    return [*pieces, *others], [*owners, *[senders[0]] * len(others)]


def _targets(
    manifest: Mapping[str, Any], layout: Sequence[tuple[torch.dtype, tuple[int, ...]]], into: Mapping[str, Tensor]
) -> list[Tensor]:
    """The tensor to receive each numbered one into: the caller's of that name and shape, else a new one."""
    own: dict[int, Tensor] = {}
    for name, number in manifest["names"].items():
        mine = into.get(name)
        if mine is None:
            continue
        if (mine.dtype, tuple(mine.shape)) != layout[number]:
            raise CheckpointMismatch(
                f"'{name}' is {layout[number]} on its senders and {(mine.dtype, tuple(mine.shape))} here: "
                "start all replicas with the same script and arguments"
            )
        if mine.is_contiguous():
            own.setdefault(number, mine.detach())
    device = next((mine.device for mine in into.values() if mine.is_cuda), torch.device("cpu"))
    return [
        own[number] if number in own else torch.empty(shape, dtype=dtype, device=device if on_gpu else "cpu")
        for number, ((dtype, shape), (_, _, on_gpu)) in enumerate(zip(layout, manifest["layout"], strict=True))
    ]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _direct(piece: Piece) -> bool:
    """Whether a piece goes from GPU to GPU."""
    return piece.on_gpu and dist.get_backend() == "nccl"


def _send(
    tensors: Sequence[Tensor],
    pieces: Sequence[Piece],
    owners: Sequence[int],
    receivers: Sequence[int],
    group: dist.ProcessGroup | None,
) -> dict[int, int]:
    rank, total = dist.get_rank(), 0
    flying: list[tuple[dist.Work | None, Tensor]] = []
    for tag, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
        if owner != rank:
            continue
        parts = [_bytes_of(tensors[segment.tensor])[segment.first : segment.end] for segment in piece.segments]
        content = parts[0] if len(parts) == 1 else torch.cat(parts)
        direct = _direct(piece)
        content = content if direct else content.cpu()
        for receiver in receivers:
            flying.append((dist.isend(content, receiver, group=None if direct else group, tag=tag), content))
        total = _checksum(content, total)
    for work, _ in flying:
        if work is not None:
            work.wait()
    return {rank: total}


def _receive(
    tensors: Sequence[Tensor], pieces: Sequence[Piece], owners: Sequence[int], group: dist.ProcessGroup | None
) -> dict[int, int]:
    flying: list[tuple[dist.Work | None, Tensor]] = []
    for tag, (piece, owner) in enumerate(zip(pieces, owners, strict=True)):
        direct = _direct(piece)
        first = piece.segments[0]
        whole = _bytes_of(tensors[first.tensor])
        if len(piece.segments) == 1 and whole.is_cuda == direct:
            buffer = whole[first.first : first.end]
        else:
            buffer = torch.empty(piece.num_bytes, dtype=torch.uint8, device=whole.device if direct else "cpu")
        flying.append((dist.irecv(buffer, owner, group=None if direct else group, tag=tag), buffer))
    sums: dict[int, int] = {}
    for piece, owner, (work, buffer) in zip(pieces, owners, flying, strict=True):
        if work is not None:
            work.wait()
        sums[owner] = _checksum(buffer, sums.get(owner, 0))
        _lay_down(buffer, piece, tensors)
    return sums


def _lay_down(buffer: Tensor, piece: Piece, tensors: Sequence[Tensor]) -> None:
    place = 0
    for segment in piece.segments:
        target = _bytes_of(tensors[segment.tensor])[segment.first : segment.end]
        source = buffer[place : place + target.numel()]
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
        place += target.numel()


def _checksum(content: Tensor, before: int) -> int:
    """CRC32 on the host, continued from `before`; on a GPU, CRC32 of two sums over its words, without a copy."""
    if not content.is_cuda:
        return zlib.crc32(content.numpy().data, before)
    words = torch.nn.functional.pad(content, (0, -content.numel() % 8)).view(torch.int64)
    weights = torch.arange(1, _WEIGHTS + 1, device=content.device)
    total = before
    for chunk in words.split(_WEIGHTS):
        mixed = torch.stack([chunk.sum(), (chunk * weights[: chunk.numel()]).sum()]).cpu().numpy()
        total = zlib.crc32(mixed.tobytes(), total)
    return total


def _compare(
    sums: Mapping[int, int], senders: Sequence[int], receivers: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    mine = torch.tensor([sums.get(sender, 0) for sender in senders], dtype=torch.int64)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine, group=group)
    for column, sender in enumerate(senders):
        for receiver in receivers:
            if int(table[receiver][column]) != int(table[sender][column]):
                raise PolluxError(f"what replica {sender} sent is not what replica {receiver} received: send it again")
