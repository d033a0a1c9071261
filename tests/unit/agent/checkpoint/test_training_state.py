"""Everything a job needs to go on: captured, copied, restored."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.manifest import require_same_signature
from pollux.agent.checkpoint.reader import load
from pollux.agent.checkpoint.state import State
from pollux.agent.checkpoint.training_state import TrainingState, mixed_seed, read_rng, require_stateful, write_rng
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.core.errors import CheckpointMismatch, InvalidInput, NonFiniteValue

CPU = torch.device("cpu")


class Counter:
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def made(kind="adam", seed=0, objects=None):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": [*model[1].parameters(), *model[2].parameters()]},
    ]
    optimizer = {
        "adam": lambda: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.01),
    }[kind]()
    replicas = ReplicaGroup(Environment(), CPU)
    return model, optimizer, TrainingState(model, optimizer, objects or {}, replicas, 5)


def steps(model, optimizer, count=3, seed=9):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 2, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
def test_what_is_restored_goes_on_as_before(kind):
    counter = Counter(4)
    model, optimizer, state = made(kind, objects={"counter": counter})
    steps(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.005
    kept = state.copied(state.own(state.rng_texts()))
    expected = steps(model, optimizer, seed=10)
    counter.count = 5
    state.restore(kept)
    assert counter.count == 4
    assert steps(model, optimizer, seed=10) == expected
    fresh_counter = Counter()
    fresh_model, fresh_optimizer, fresh = made(kind, seed=7, objects={"counter": fresh_counter})
    model2, optimizer2, state2 = made(kind, objects={"counter": counter})
    steps(model2, optimizer2)
    optimizer2.param_groups[1]["lr"] = 0.005
    fresh.restore(state2.copied(state2.own(state2.rng_texts())))
    assert fresh_counter.count == 4
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1, 0.005]
    assert steps(fresh_model, fresh_optimizer, seed=10) == expected


def test_a_copy_does_not_follow_the_model():
    model, optimizer, state = made()
    steps(model, optimizer)
    kept = state.copied(state.own(state.rng_texts()))
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    steps(model, optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.tensors.items())


def test_names_say_what_they_are():
    model, optimizer, state = made()
    steps(model, optimizer)
    names = set(state.own(state.rng_texts()).tensors)
    assert {"model.0.weight", "model.1.running_mean", "optimizer.state.0.weight.exp_avg_sq"} <= names
    assert state.signature()["optimizer"] == "Adam"
    assert state.signature()["parameter"]["0.weight"] == "[3, 2] float32"


def test_an_optimiser_with_other_groups_is_refused():
    model, optimizer, state = made()
    steps(model, optimizer)
    kept = state.copied(state.own(state.rng_texts()))
    plain = torch.optim.Adam(model.parameters())
    other = TrainingState(model, plain, {}, ReplicaGroup(Environment(), CPU), 5)
    with pytest.raises(CheckpointMismatch, match="2 parameter groups, this one has 1"):
        other.restore(kept)


def test_an_object_that_was_not_saved_is_refused_by_name():
    _, _, state = made()
    kept = state.copied(state.own(state.rng_texts()))
    _, _, other = made(objects={"counter": Counter()})
    with pytest.raises(CheckpointMismatch, match="no state for 'counter'"):
        other.restore(kept)


def test_an_object_that_is_not_given_any_more_is_named(caplog):
    _, _, state = made(objects={"counter": Counter()})
    kept = state.copied(state.own(state.rng_texts()))
    _, _, other = made()
    other.restore(kept)
    assert "holds the state of 'counter', which is not given now" in caplog.text


def test_objects_must_be_able_to_save_themselves():
    assert set(require_stateful({"a": Counter()})) == {"a"}
    with pytest.raises(InvalidInput, match=r"state\['b'\] is a int without state_dict and load_state_dict"):
        require_stateful({"a": Counter(), "b": 3})


class Remembering(nn.Module):
    """A layer with a mask that is not finite, and with state that is no tensor in memory."""

    mask: torch.Tensor

    def __init__(self, note, amax=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.note = note
        self.amax = Amax(amax)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


class Amax(nn.Module):
    """Gives its extra state as a tensor, made anew each time it is asked for."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return torch.tensor([self.value])

    def set_extra_state(self, state):
        self.value = state.item()


class Compiled(nn.Module):
    """Names as torch.compile gives them."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


def remembering(note, amax=0.0, wrap=nn.Sequential):
    model = wrap(Remembering(note, amax))
    inner = next(module for module in model.modules() if isinstance(module, Remembering))
    optimizer = torch.optim.SGD([inner.weight], 0.1)
    return inner, model, TrainingState(model, optimizer, {}, ReplicaGroup(Environment(), CPU), 0)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda inner: Compiled(nn.Sequential(inner))])
def test_what_modules_keep_beside_tensors_goes_on_too(tmp_path, wrap):
    inner, _, state = remembering(["a"], 2.5, wrap)
    captured = state.own(state.rng_texts())
    assert {name: value for name, value in captured.objects.items() if name.startswith("model.")} == {
        "model.0._extra_state": {"note": ["a"]},
        "model.0.amax._extra_state": torch.tensor([2.5]),
    }
    assert set(captured.tensors) == {"model.0.weight", "model.0.frozen", "model.0.mask"}
    kept = state.copied(captured)
    inner.note.append("b")
    inner.amax.value = 7.0
    state.restore(kept)
    assert (inner.note, inner.amax.value) == (["a"], 2.5)

    captured = state.own(state.rng_texts())
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, State(captured.tensors, captured.objects, captured.values), state.signature(), wait=True)
    assert isinstance(checkpointer.last_error, NonFiniteValue), "the mask, unless parameters alone are looked at"
    names = state.parameter_names()
    checkpointer.save(
        1, State(captured.tensors, captured.objects, captured.values), state.signature(), wait=True, finite=names
    )
    saved = checkpointer.latest()
    assert saved is not None
    checkpointer.close()
    other, _, fresh = remembering(None)
    in_place = fresh.templates(saved)
    loaded = load(saved, in_place, signature=fresh.signature())
    loaded.tensors.update(in_place)
    fresh.restore(loaded, tensors_in_place=True)
    assert (other.note, other.amax.value) == (["a"], 2.5)


def test_plain_pytorch_finds_extra_state_under_its_own_name(tmp_path):
    captured = remembering(["a"], 2.5)[2].own(())
    checkpointer = Checkpointer(tmp_path / "c")
    checkpointer.save(1, State(captured.tensors, captured.objects, captured.values), {}, wait=True, finite=())
    checkpointer.close()
    other, model, _ = remembering(None)
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "c" / "step-0000000001")
    model.load_state_dict({name.removeprefix("model."): value for name, value in found.items()})
    assert other.note == ["a"]


def test_a_checkpoint_without_the_extra_state_does_not_fit():
    _, _, state = remembering(["a"])
    signature = state.signature()
    assert signature["object"] == {"0._extra_state": "kept", "0.amax._extra_state": "kept"}
    without = {**signature, "object": {"0._extra_state": "kept"}}
    with pytest.raises(CheckpointMismatch, match=r"object 0\.amax\._extra_state is in the model but not in the checkp"):
        require_same_signature(without, signature)
    assert "object" not in made()[2].signature(), "so that checkpoints from before still fit"


def test_what_a_models_own_hooks_add_is_given_back_to_them():
    model = nn.Linear(2, 1)
    seen = []
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update({"version": 3}))
    model.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: seen.append(state.get("version")))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1), {}, ReplicaGroup(Environment(), CPU), 0)
    kept = state.copied(state.own(state.rng_texts()))
    kept.objects["model.version"] = 2
    before = model.weight.detach().clone()
    state.restore(kept)
    assert seen == [2]
    assert torch.equal(model.weight, before)


def test_trainable_parameters_are_told_from_buffers():
    for wrap in (nn.Sequential, lambda inner: Compiled(nn.Sequential(inner))):
        assert remembering(None, wrap=wrap)[2].parameter_names() == {"model.0.weight"}
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    state = TrainingState(tied, torch.optim.SGD(tied.parameters(), 0.1), {}, ReplicaGroup(Environment(), CPU), 0)
    assert state.parameter_names() == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}


def draws():
    return random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))


def test_random_states_travel_as_text():
    random.gauss(0, 1)
    np.random.normal()
    text = read_rng(CPU)
    expected = draws()
    draws()
    write_rng(text, CPU)
    assert draws() == expected


def test_at_another_number_of_replicas_random_states_are_drawn_anew():
    _, _, state = made()
    values = state.own(state.rng_texts()).values
    state.restore_rng({"rng": values["rng"] * 2}, 17)
    first = draws()
    state.restore_rng({"rng": values["rng"] * 3}, 17)
    assert draws() == first, "from seed, step and replica alone"
    state.restore_rng({"rng": values["rng"] * 3}, 18)
    assert draws() != first


def test_seeds_differ():
    seeds = {mixed_seed(seed, step, replica) for seed in range(3) for step in range(30) for replica in range(8)}
    assert len(seeds) == 720
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_compiled_model_has_the_same_names():
    inner = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    replicas = ReplicaGroup(Environment(), CPU)
    plain = TrainingState(inner, optimizer, {}, replicas, 0).signature()
    assert TrainingState(Compiled(inner), optimizer, {}, replicas, 0).signature() == plain
