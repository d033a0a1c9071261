"""Sends bytes between replicas in tensors, so that nothing is unpickled; the group must carry CPU tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast_bytes", "gather_bytes"]


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def broadcast_bytes(content: bytes, source: int, group: dist.ProcessGroup | None) -> bytes:
    """The bytes that rank `source` passes, on all ranks of the group; a collective. Others may pass anything."""
    length = torch.tensor([len(content)])
    dist.broadcast(length, source, group=group)
    is_source = dist.get_rank() == source
    buffer = _as_tensor(content) if is_source else torch.empty(int(length), dtype=torch.uint8)
    if buffer.numel():
        dist.broadcast(buffer, source, group=group)
    return buffer.numpy().tobytes()


def gather_bytes(content: bytes, num_replicas: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of all replicas of the group, by replica; a collective unless there is one replica."""
    if num_replicas == 1:
        return [content]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(num_replicas)]
    dist.all_gather(lengths, torch.tensor([len(content)]), group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(content)] = _as_tensor(content)
    parts = [torch.empty_like(padded) for _ in range(num_replicas)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
