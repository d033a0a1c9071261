"""How long training waits for a checkpoint: asynchronous against synchronous saves of the same state, interleaved.

The pause is the wall time of `Checkpointer.save` as the training thread sees it, with no write in flight before it.
It is compared with the same save waited for (written, flushed, verified, renamed), and, as the harder bar, with a plain
`torch.distributed.checkpoint.save` that is flushed but neither digested nor verified.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.reader import parameter_signature
from pollux.agent.checkpoint.state import State

REPEATS = 10
LAYERS = 24


def job_state(megabytes: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters and the two moments of Adam of a model of equal layers, `megabytes` in all."""
    generator = torch.Generator().manual_seed(seed)
    numbers = megabytes * 1_000_000 // 4 // 3 // LAYERS + 1
    tensors = {}
    for layer in range(LAYERS):
        for name in ("model.{}.weight", "optimizer.state.{}.weight.exp_avg", "optimizer.state.{}.weight.exp_avg_sq"):
            tensors[name.format(layer)] = torch.randn(numbers, generator=generator).to(device)
        tensors[f"model.{layer}.bias"] = torch.zeros(64, device=device)
    return tensors


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def plain_save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """What a user would wait for without us: DCP's own save, its folder flushed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder, sync_files=True), no_dist=True)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def compute_seconds(until: Callable[[], bool], least: int, device: str) -> float:
    """Mean seconds of a small matrix product and its Python, over at least `least` of them and until told."""
    matrix = torch.randn(300, 300, device=device)
    began, count = time.perf_counter(), 0
    while count < least or not until():
        (matrix @ matrix).sum().item()
        count += 1
    return (time.perf_counter() - began) / count


def measure(quick: bool, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Pauses and saves of one state: 540 MB ten times, or 100 MB three times when `quick`."""
    tensors = job_state(100 if quick else 540, seed, device)
    signature = parameter_signature(tensors)
    pauses, plain, waited, slowed = [], [], [], []
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-bench-", dir=os.environ.get("POLLUX_BENCH_FOLDER")))
    checkpointer = Checkpointer(folder)
    try:
        checkpointer.prepare(tensors)
        for turn in range(3 if quick else REPEATS):
            plain.append(seconds(lambda: plain_save(tensors, folder / "plain")))
            shutil.rmtree(folder / "plain")
            save = partial(checkpointer.save, state=State(tensors, values={"turn": turn}), signature=signature)
            waited.append(seconds(partial(save, 2 * turn, wait=True)))
            alone = compute_seconds(lambda: True, 1000, device)
            pauses.append(seconds(partial(save, 2 * turn + 1)))
            slowed.append(compute_seconds(lambda: not checkpointer.busy, 1, device) / alone)
            checkpointer.wait()
            if checkpointer.last_error is not None:
                raise checkpointer.last_error
            torch._foreach_add_(list(tensors.values()), 1e-3)
    finally:
        checkpointer.close()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "checkpoint_pause_ratio": statistics.median(pauses) / statistics.median(waited),
        "checkpoint_pause_ratio_plain_dcp": statistics.median(pauses) / statistics.median(plain),
        "pauses": pauses,
        "sync_seconds": waited,
        "plain_dcp_sync_seconds": plain,
        "state_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "compute_slowdown_while_writing": statistics.median(slowed),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    print(json.dumps(measure(options.quick, options.seed, options.device)))
