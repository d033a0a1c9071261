"""What the tests of checkpoints share: a small state for each step, and looks at what lies in the folder."""

from pathlib import Path
from typing import Any

import torch

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.reader import Saved, parameter_signature
from pollux.agent.checkpoint.state import State


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model.weight": torch.full((4, 3), float(step)), "optimizer.state.weight.step": torch.tensor(float(step))}


def put(checkpointer: Checkpointer, *steps: int, **options: Any) -> None:
    for step in steps:
        tensors = state(step)
        checkpointer.save(
            step,
            State(tensors, {"user": {"step": step}}, {"step": step}),
            parameter_signature(tensors),
            wait=True,
            **options,
        )


def names(checkpointer: Checkpointer) -> set[str]:
    return {path.name for path in checkpointer.folder.iterdir()} - {".lock"}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def newest(checkpointer: Checkpointer) -> Saved:
    saved = checkpointer.latest()
    assert saved is not None
    return saved
