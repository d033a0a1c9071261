"""Checkpoints of a sharded job: written by all replicas together, loaded at any number of them.

Run as a script, this file plays the replicas of the job.
"""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.agent.checkpoint import host_buffers
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.reader import load
from pollux.agent.checkpoint.state import State
from pollux.core.errors import (
    CheckpointDamaged,
    InvalidInput,
    NonFiniteValue,
)
from pollux.testing.waiting import PATIENCE_SECONDS


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def test_sharded_state_at_other_sizes(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == {"saved at 2": [0, 0], "loaded at 3": [0, 0, 0], "loaded at 1": [0], "damaged at 2": [0, 0]}


def sharded_job(replica: int, num_replicas: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(replica)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_replicas,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def sharded_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.state.{name}.{key}"] = value
    return tensors


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(12, 5, generator=generator)
    for _ in range(steps):
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_at_two(path: Path, replica: int, num_replicas: int) -> None:
    """Save a trained FSDP2 job, with failures on one replica on the way; note how it would have gone on."""
    checkpointer = Checkpointer(
        path / "c", replica=replica, num_replicas=num_replicas, group=dist.new_group(backend="gloo"), sharded=True
    )
    assert checkpointer.latest() is None
    model, optimizer = sharded_job(0, num_replicas)
    train(model, optimizer, 3)
    tensors = sharded_tensors(model, optimizer)
    checkpointer.save(3, State(tensors, {"user": [0]}, {"step": 3}), {})
    checkpointer.save(3, State(tensors, {"user": [1]}, {"step": 3}), {})
    after = train(model, optimizer, 2)
    checkpointer.wait()
    assert checkpointer.last_error is None, checkpointer.last_error
    if replica == 0:
        (path / "losses.json").write_text(json.dumps(after))
    real = host_buffers._DigestingStream.write
    if replica == 1:
        host_buffers._DigestingStream.write = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))  # type: ignore[method-assign]
    checkpointer.save(4, State(tensors, {}, {}), {}, wait=True)
    assert "full" in str(checkpointer.last_error), checkpointer.last_error
    host_buffers._DigestingStream.write = real  # type: ignore[method-assign]
    if replica == 1:
        with pytest.raises(InvalidInput, match="'user' of type function"):
            checkpointer.save(4, State(tensors, {"user": lambda: None}, {}), {})
        checkpointer.wait()
    else:
        checkpointer.save(4, State(tensors, {"user": [1]}, {}), {}, wait=True)
    assert isinstance(checkpointer.last_error, InvalidInput), checkpointer.last_error
    bad = {**tensors, "model.extra": torch.tensor(float("nan") if replica == 1 else 0.0)}
    checkpointer.save(5, State(bad, {}, {}), {}, wait=True)
    assert isinstance(checkpointer.last_error, NonFiniteValue), checkpointer.last_error
    saved = checkpointer.latest()
    assert saved is not None
    assert (saved.manifest.step, saved.manifest.num_replicas, saved.manifest.values) == (3, 2, {"step": 3})
    assert saved.path.name == "step-0000000003-1"
    checkpointer.close()


def load_and_go_on(path: Path, replica: int, num_replicas: int) -> None:
    """Load at another size, optimiser state included, and train on; the losses must be those of the first job."""
    checkpointer = Checkpointer(path / "c", replica=replica, num_replicas=num_replicas, sharded=True)
    saved = checkpointer.latest()
    assert saved is not None
    model, optimizer = sharded_job(100 + replica, num_replicas)
    train(model, optimizer, 1)
    loaded = load(saved, sharded_tensors(model, optimizer))
    assert (loaded.tensors, loaded.objects) == ({}, {"user": [1]})
    expected = json.loads((path / "losses.json").read_text())
    torch.testing.assert_close(torch.tensor(train(model, optimizer, 2)), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    load(saved, {f"model.{name}": tensor for name, tensor in plain.state_dict().items()})
    data = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    loss = (plain(data) - data.sum(1, keepdim=True)).square().mean().item()
    assert abs(loss - expected[0]) < 1e-5
    checkpointer.close()


def find_damage_together(path: Path, replica: int, num_replicas: int) -> None:
    if replica == 0:
        flip(path / "c" / "step-0000000003-1" / "__1_0.distcp", 300)
    dist.barrier()
    checkpointer = Checkpointer(path / "c", replica=replica, num_replicas=num_replicas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointDamaged, match="none of the 1 checkpoints"):
            checkpointer.latest()
    dist.barrier()
    with pytest.raises(InvalidInput, match="does not exist"):
        Checkpointer(path / "missing" / "c", replica=replica, num_replicas=num_replicas)
    checkpointer.close()


def play(scene, path: Path, num_replicas: int) -> list[int]:
    """Run `scene` in forked processes, one a replica; their exit codes."""
    children = []
    for replica in range(num_replicas):
        child = os.fork()
        if child == 0:
            code = 1
            # A replica whose peers failed would wait for them beyond the test.
            signal.alarm(60)
            try:
                store = dist.FileStore(str(path / f"store-{scene.__name__}-{num_replicas}"), num_replicas)
                dist.init_process_group("gloo", store=store, rank=replica, world_size=num_replicas)
                scene(path, replica, num_replicas)
                code = 0
            except BaseException:
                logging.getLogger("play").exception("replica %d of %d in %s", replica, num_replicas, scene.__name__)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    place = Path(sys.argv[1])
    outcome = {
        "saved at 2": play(save_at_two, place, 2),
        "loaded at 3": play(load_and_go_on, place, 3),
        "loaded at 1": play(load_and_go_on, place, 1),
        "damaged at 2": play(find_damage_together, place, 2),
    }
    print(json.dumps(outcome))
