"""A group on NCCL that is broken off and made anew, on one GPU. Run with `pytest -m gpu tests/gpu`."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.agent.distributed import process_group as module
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup, WrappedModel

pytestmark = [pytest.mark.gpu]


@pytest.fixture
def made(monkeypatch):
    """A world of one on NCCL."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        # Set first, so that what the code under test sets is taken back.
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    one = ReplicaGroup(Environment(), torch.device("cuda", 0), 60.0, dist.HashStore())
    one._join(dist.HashStore())
    yield one
    one.close()


def step(model: Any, wrapped: Any) -> float:
    x = torch.ones(4, 8, device="cuda")
    loss = wrapped(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    return float(loss.detach())


def test_a_group_is_broken_off_and_another_one_goes_on(made):
    assert dist.get_backend() == "nccl"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    model = nn.Linear(8, 1).cuda()
    made._wrapped = WrappedModel(model)
    losses = [step(model, made._wrapped) for _ in range(3)]
    assert made.abort_collectives()
    assert made.is_broken
    with pytest.raises(RuntimeError, match="NCCL"):
        dist.all_reduce(torch.ones(1, device="cuda"))
    made.disconnect()
    assert not dist.is_initialized()
    for _ in range(2):
        made._join(dist.HashStore())
        made._wrapped = WrappedModel(model)
        losses.append(step(model, made._wrapped))
        made.abort_collectives()
        made.disconnect()
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 5


def test_a_step_that_is_not_done_on_the_gpu_is_noticed(made, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.1)
    value = torch.ones(1, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    # As a kernel that waits: some seconds of the GPU's clock.
    torch.cuda._sleep(6_000_000_000)
    dist.all_reduce(value)
    assert not made.abort_collectives()
    made.disconnect()
    made._join(dist.HashStore())
    dist.all_reduce(value)
    assert value.item() == 1.0
