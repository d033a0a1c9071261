"""What being resizable costs a step, and what a change costs, on one device. For `resize.py --gpu`.

Needs nothing but PyTorch and NumPy. *Steps*: blocks of the same training with and without a store to listen to, in the
order ABBA, and what PyTorch's profiler sees of both. *Group*: a world of one, made and destroyed again and again (NCCL
on a GPU). *Two processes*: a real job that grows and shrinks; on one GPU both share it, through gloo. What fails is
named in the result, and the rest goes on.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

FEATURES, CLASSES, LAYERS = 1024, 10, 4
CHANGES = (2, 1, 2, 1)
LEAST_STEPS = 5
HOST = (
    "import sys, time, torch.distributed as dist; "
    "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
    "print(store.port, flush=True); sys.stdin.read()"
)


def measure(device: str, quick: bool) -> dict[str, Any]:
    """Everything that can be tried on this device."""
    import torch

    small = device == "cpu"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if not small else "cpu",
        "torch": torch.__version__,
        "not_tried": [
            "NCCL among several GPUs: two ranks cannot share one, and there is one here",
            "a change between two machines",
        ],
    }
    parts: dict[str, Callable[[], Any]] = {
        "steps": lambda: step_cost(device, blocks=2 if quick else 12, steps=40 if quick else 150),
        "profile": lambda: profiles(device),
        "group": lambda: group_of_one(device, 4 if quick else 20),
        "two_processes": lambda: two_processes(device, (512,) if small else (2048, 8192)),
    }
    for name, part in parts.items():
        began = time.monotonic()
        try:
            result[name] = part()
        except Exception as error:
            traceback.print_exc()
            result[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"{name}: {time.monotonic() - began:.0f} s: {str(result[name])[:1500]}", file=sys.stderr, flush=True)
    return result


def task(device: str, width: int, batch: int) -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    sizes = [FEATURES, *[width] * LAYERS, CLASSES]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    data = torch.utils.data.TensorDataset(torch.randn(16 * batch, FEATURES), torch.randint(0, CLASSES, (16 * batch,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5), data


class Host:
    """A process that hosts a job's store, as the backend's does, and the variables of a replica that listens to it."""

    def __enter__(self) -> dict[str, str]:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        return {"POLLUX_STORE": f"127.0.0.1:{port}", "POLLUX_GENERATION": "1"}

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()


def train(job: Any, steps: int, synchronize: Callable[[], object]) -> float:
    """Seconds for so many steps, until the device has done them."""
    import torch.nn.functional as F

    began, done = 0.0, -10
    for _ in job.epochs(10_000):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
            done += 1
            if done == 0:
                synchronize()
                began = time.perf_counter()
            if done == steps:
                synchronize()
                return time.perf_counter() - began
    raise AssertionError("it ends only by itself")


def opened(device: str, parts: tuple[Any, Any, Any], batch: int, variables: dict[str, str]) -> Any:
    import pollux

    for name in ("POLLUX_STORE", "POLLUX_GENERATION"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    model, optimizer, data = parts
    return pollux.init(model, optimizer, data, batch, device=device)


def synchronizer(device: str) -> Callable[[], object]:
    import torch

    return (lambda: None) if device == "cpu" else torch.cuda.synchronize


def step_cost(device: str, blocks: int, steps: int) -> dict[str, Any]:
    """Seconds per step with and without a store, and how much more the former is, with its standard error."""
    batch = 32 if device == "cpu" else 1024
    parts = task(device, 256 if device == "cpu" else 8192, batch)
    synchronize = synchronizer(device)
    seconds: dict[str, list[float]] = {"plain": [], "resizable": []}
    differences = []
    with Host() as variables:
        for block in range(-1, blocks):
            group: dict[str, list[float]] = {"plain": [], "resizable": []}
            for kind in ("plain", "resizable", "resizable", "plain"):
                job = opened(device, parts, batch, variables if kind == "resizable" else {})
                group[kind].append(train(job, steps, synchronize) / steps)
                job.close()
            if block >= 0:
                # The one before warmed the device and the allocator up.
                for kind, times in group.items():
                    seconds[kind] += times
                differences.append(sum(group["resizable"]) / sum(group["plain"]) - 1.0)
    spread = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    return {
        "step_seconds": {kind: statistics.median(times) for kind, times in seconds.items()},
        "overhead": statistics.mean(differences),
        "standard_error": spread,
        "blocks": 4 * blocks,
        "steps_a_block": steps,
    }


def profiles(device: str) -> dict[str, Any]:
    """Collectives, copies to the host and waits of ten ordinary steps, with and without a store."""
    parts = task(device, 128, 32)
    with Host() as variables:
        plain, resizable = (_profile(device, parts, which) for which in ({}, variables))
    return {"same": plain == resizable, "plain": plain, "resizable": resizable}


def _profile(device: str, parts: tuple[Any, Any, Any], variables: dict[str, str]) -> dict[str, int]:
    import torch
    import torch.nn.functional as F
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([] if device == "cpu" else [ProfilerActivity.CUDA])]
    profiler = torch.profiler.profile(activities=kinds)
    job = opened(device, parts, 32, variables)
    names: dict[str, int] = {}
    for _ in job.epochs(2):
        for x, y in job.batches():
            if job.step == 4:
                profiler.start()
            job.backward(F.cross_entropy(job.model(x), y))
            if job.step == 14:
                profiler.stop()
                signs = ("c10d::", "gloo:", "nccl", "Memcpy", "ynchronize", "aten::item", "_local_scalar_dense")
                found = {event.key: event.count for event in profiler.key_averages()}
                names = {name: count for name, count in found.items() if any(sign in name for sign in signs)}
    job.close()
    return names


def group_of_one(device: str, times: int) -> dict[str, Any]:
    """Seconds to make a group of one process with its first collective, and to destroy it, again and again."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend, synchronize = "gloo" if device == "cpu" else "nccl", synchronizer(device)
    values = torch.ones(1 << 20, device=device)
    made, destroyed = [], []
    for number in range(times):
        began = time.perf_counter()
        prefix, limit = dist.PrefixStore(str(number), store), datetime.timedelta(seconds=60)
        dist.init_process_group(backend, store=prefix, rank=0, world_size=1, timeout=limit)
        dist.all_reduce(values)
        synchronize()
        there = time.perf_counter()
        dist.destroy_process_group()
        made.append(there - began)
        destroyed.append(time.perf_counter() - there)
    return {
        "backend": backend,
        "first_seconds": made[0],
        "again_seconds": statistics.median(made[1:]),
        "destroy_seconds": statistics.median(destroyed),
    }


def replica(folder: str, width: int, device: str) -> None:
    """One replica of the job that grows and shrinks; several share one GPU, which NCCL does not do."""
    import torch.distributed as dist
    import torch.nn.functional as F

    import pollux

    original: Callable[..., None] = dist.init_process_group
    dist.init_process_group = lambda backend, **more: original("gloo", **more)
    batch = 32 if device == "cpu" else 256
    model, optimizer, data = task(device, width, batch)
    job = pollux.init(model, optimizer, data, batch, device=device, checkpoint_dir=Path(folder) / "checkpoints",
                      checkpoint_every=1e6)  # fmt: skip
    for _ in job.epochs(10_000):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
    job.close()


def two_processes(device: str, widths: tuple[int, ...]) -> list[dict[str, Any]]:
    """The pauses of a job on this device from one process to two and back, by its parameters."""
    return [pause for width in widths for pause in _pauses(device, width)]


def _pauses(device: str, width: int) -> list[dict[str, Any]]:
    from pollux.testing.jobs.replica_server import ReplicaServer

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.support.live_supervisor import LiveSupervisor

    visible = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    where = "cpu" if device == "cpu" else "cuda:0"
    rows = []
    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as folder, ReplicaServer() as server:
        arguments = {"folder": folder, "width": width, "device": where}
        supervisor = LiveSupervisor(server, f"{__file__}:replica", arguments, {"POLLUX_TIMEOUT": "120", **visible})
        try:
            supervisor.start(1)
            _until(lambda: supervisor.step() >= LEAST_STEPS, supervisor)
            for size in CHANGES:
                outcome = supervisor.resize(size)
                if outcome != "done":
                    raise RuntimeError(f"the change to {size} came out as '{outcome}'\n{supervisor.outputs()}")
                pause = supervisor.pauses[-1]
                rows.append({"width": width, "to": size, **{k: pause[k] for k in ("pause_seconds", "parts", "bytes")}})
                time.sleep(1.5)
        finally:
            for rank in range(len(supervisor.members)):
                supervisor.kill(rank, signal.SIGKILL)
            supervisor.close()
    return rows


def _until(look: Callable[[], bool], supervisor: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not look():
        if time.monotonic() > end:
            raise RuntimeError(f"no first steps after {seconds:g} s\n{supervisor.outputs()}")
        time.sleep(0.01)
