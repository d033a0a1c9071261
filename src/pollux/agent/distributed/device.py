"""The device that a replica trains on, and the name under which its step times and memory limits are kept."""

from __future__ import annotations

import torch

from pollux.agent.distributed.environment import Environment
from pollux.core.errors import InvalidInput

__all__ = ["choose_device", "gpu_type"]


def _named_device(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(f"device is '{asked}', which PyTorch does not know: give 'cpu' or 'cuda'") from error
    if device.type == "meta":
        raise InvalidInput(f"device is '{asked}', which holds no values to train: give 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(f"device is '{asked}', but PyTorch finds no GPU here: leave device out to run on the CPU")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise InvalidInput(
            f"device is '{asked}', but this node shows {torch.cuda.device_count()} GPUs: give one of them, or leave "
            "device out for one each"
        )
    return device


def choose_device(asked: torch.device | str | None, environment: Environment) -> torch.device:
    """The requested device; by default this replica's GPU where there is one, else the CPU."""
    if asked is not None:
        device = _named_device(asked)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        count = torch.cuda.device_count()
        if environment.local_replica >= count:
            raise InvalidInput(
                f"LOCAL_RANK is {environment.local_replica}, but this node shows {count} GPUs: start at most "
                f"{count} replicas here, or set device='cpu'"
            )
        device = torch.device("cuda", environment.local_replica)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def gpu_type(device: torch.device) -> str:
    """The name under which step times and memory limits are kept: the GPU's, or 'cpu'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
