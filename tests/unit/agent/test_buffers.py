"""Buffers that a model's state lacks: told from the others, and taken over from another replica."""

from typing import Any

import pytest
import torch
from torch import nn

from pollux.agent.checkpoint.training_state import TrainingState
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.state_transfer import pack
from pollux.core.errors import CheckpointMismatch


class Layer(nn.Module):
    projection: Any
    cache: Any
    mask: Any

    def __init__(self, value: float, cache: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("projection", torch.full((2, 3), value), persistent=False)
        self.register_buffer("cache", cache, persistent=False)
        self.register_buffer("mask", torch.full((1, 1), value).expand(2, 2), persistent=False)


def made(value: float, cache: Any = None, wrap: Any = nn.Sequential) -> tuple[Any, TrainingState]:
    model = wrap(Layer(value, cache))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, TrainingState(model, optimizer, {}, ReplicaGroup(Environment(), torch.device("cpu")), 0)


class Compiled(nn.Module):
    """As a compiled model names what is inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


@pytest.mark.parametrize(("wrap", "prefix"), [(nn.Sequential, "0."), (Compiled, "")])
def test_they_are_those_that_no_checkpoint_has(wrap, prefix):
    _, state = made(1.0, wrap=wrap)
    buffers = state.unsaved_buffers()
    assert sorted(buffers) == [f"{prefix}cache", f"{prefix}mask", f"{prefix}projection"]
    assert buffers[f"{prefix}cache"] is None
    assert not any("projection" in name for name in (*state.own(()).tensors, *state.own(()).objects))


@pytest.mark.parametrize("cache", [None, torch.zeros(3), torch.zeros(5), torch.zeros(3, dtype=torch.int64)])
@pytest.mark.parametrize("sent", [None, torch.ones(3)])
def test_they_are_taken_over_whatever_they_were_before(cache, sent):
    _, there = made(2.0, sent)
    model, here = made(1.0, cache)
    projection = model[0].projection
    here.set_buffers(there.unsaved_buffers())
    assert model[0].projection is projection, "in place, where it fits"
    assert model[0].projection.tolist() == [[2.0] * 3] * 2
    assert model[0].mask.tolist() == [[2.0] * 2] * 2
    assert model[0].kept.tolist() == [1.0, 1.0], "that is sent with the state"
    assert (model[0].cache is None) == (sent is None)
    if sent is not None:
        assert torch.equal(model[0].cache, sent)
        assert model[0].cache.dtype == sent.dtype


def test_one_that_was_registered_on_the_way_is_registered_here():
    other, there = made(2.0)
    other[0].linear.register_buffer("late", torch.ones(4), persistent=False)
    model, here = made(1.0)
    here.set_buffers(there.unsaved_buffers())
    assert model[0].linear.late.tolist() == [1.0] * 4
    assert "0.linear.late" not in model.state_dict()


def test_one_of_a_module_that_is_not_here_does_not_fit_and_changes_nothing():
    other, there = made(2.0)
    other[0].more = nn.Module()
    other[0].more.register_buffer("late", torch.ones(4), persistent=False)
    model, here = made(1.0)
    with pytest.raises(CheckpointMismatch, match=r"a buffer '0\.more\.late', and this one has no such module"):
        here.set_buffers(there.unsaved_buffers())
    assert model[0].projection.tolist() == [[1.0] * 3] * 2


def test_they_travel_whole_and_without_pickle():
    _, state = made(2.0, torch.ones(3))
    own = state.own(())
    before = len(pack(own).tensors)
    own.objects["buffers"] = state.unsaved_buffers()
    assert len(pack(own).tensors) == before + 3
