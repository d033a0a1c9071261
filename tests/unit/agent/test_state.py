"""Everything a job needs to go on: captured, copied, restored."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pollux.agent.environment import Environment
from pollux.agent.replicas import Replicas
from pollux.agent.state import TrainingState, mixed_seed, read_rng, require_stateful, write_rng
from pollux.core.errors import CheckpointMismatch, InvalidInput

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
    replicas = Replicas(Environment(), CPU)
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
    kept = state.copied(state.capture())
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
    fresh.restore(state2.copied(state2.capture()))
    assert fresh_counter.count == 4
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1, 0.005]
    assert steps(fresh_model, fresh_optimizer, seed=10) == expected


def test_a_copy_does_not_follow_the_model():
    model, optimizer, state = made()
    steps(model, optimizer)
    kept = state.copied(state.capture())
    before = {name: tensor.clone() for name, tensor in kept.tensors.items()}
    steps(model, optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.tensors.items())


def test_names_say_what_they_are():
    model, optimizer, state = made()
    steps(model, optimizer)
    names = set(state.capture().tensors)
    assert {"model.0.weight", "model.1.running_mean", "optimizer.state.0.weight.exp_avg_sq"} <= names
    assert state.signature()["optimizer"] == "Adam"
    assert state.signature()["parameter"]["0.weight"] == "[3, 2] float32"


def test_an_optimiser_with_other_groups_is_refused():
    model, optimizer, state = made()
    steps(model, optimizer)
    kept = state.copied(state.capture())
    plain = torch.optim.Adam(model.parameters())
    other = TrainingState(model, plain, {}, Replicas(Environment(), CPU), 5)
    with pytest.raises(CheckpointMismatch, match="2 parameter groups, this one has 1"):
        other.restore(kept)


def test_an_object_that_was_not_saved_is_refused_by_name():
    _, _, state = made()
    kept = state.copied(state.capture())
    _, _, other = made(objects={"counter": Counter()})
    with pytest.raises(CheckpointMismatch, match="no state for 'counter'"):
        other.restore(kept)


def test_objects_must_be_able_to_save_themselves():
    assert set(require_stateful({"a": Counter()})) == {"a"}
    with pytest.raises(InvalidInput, match=r"state\['b'\] is a int without state_dict and load_state_dict"):
        require_stateful({"a": Counter(), "b": 3})


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
    values = state.capture().values
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
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    inner = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    replicas = Replicas(Environment(), CPU)
    plain = TrainingState(inner, optimizer, {}, replicas, 0).signature()
    assert TrainingState(Wrapped(inner), optimizer, {}, replicas, 0).signature() == plain
