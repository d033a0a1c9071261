"""The model that a script keeps, through whatever sizes its job has afterwards."""

import copy
import gc
import io
import pickle
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup, WrappedModel
from pollux.agent.step.loss_weighting import LossWeighting
from pollux.agent.step.model_handle import stable_handle
from pollux.agent.step.optimizer_step import StepOptions, StepRunner


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.vocabulary = 11

    def forward(self, x: Any, times: float = 1.0) -> Any:
        return self.layer(x) * times

    def twice(self, x: Any) -> Any:
        return self(x) + self(x)


class Unlike(Model):
    """Does not want to be derived from."""

    def __init_subclass__(cls, *, name: str) -> None:
        super().__init_subclass__()


class Sizes(ReplicaGroup):
    """Replicas of any size, as far as the wrapper goes: its group has this process alone."""

    def __init__(self) -> None:
        super().__init__(Environment(), torch.device("cpu"), meeting=dist.HashStore())

    def regroup(self, engine: StepRunner, size: int) -> None:
        if self._wrapped is not None:
            self._wrapped.release_group()
            self._wrapped = None
        self.num_replicas = size
        engine.regroup()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine(size: int) -> tuple[Any, Sizes]:
    model, replicas = Model(), Sizes()
    replicas.num_replicas = size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StepRunner(
        model, optimizer, replicas, LossWeighting(replicas, 4, adaptive=False), None, StepOptions()
    ), replicas


X = torch.ones(2, 3)


def goes_to_the_current_one(made: Any, kept: Any) -> bool:
    """Whether calling the kept model is calling the one that averages gradients, where there is one."""
    wrapped = isinstance(made.model, WrappedModel)
    if wrapped:
        made.model.ran = False
    same = torch.equal(kept(X, times=2.0), made.inner(X) * 2.0)
    return same and (not wrapped or made.model.ran)


@pytest.mark.parametrize("first", [1, 2])
def test_what_was_kept_at_any_size_is_followed_to_every_other(group, first):
    made, replicas = engine(first)
    kept = [made.given]
    for size in (1, 2, 3, 1, 4, 1, 1, 2, 2):
        replicas.regroup(made, size)
        kept.append(made.given)
        assert [goes_to_the_current_one(made, each) for each in kept] == [True] * len(kept)
        assert {each.vocabulary for each in kept} == {11}


def test_thousands_of_changes_leave_neither_a_chain_nor_wrappers(group):
    made, replicas = engine(2)
    kept, old = made.given, []
    for number in range(1200):
        replicas.regroup(made, 1 if number % 3 == 0 else 2)
        old.append(weakref.ref(made.model))
    assert goes_to_the_current_one(made, kept)
    gc.collect()
    assert [each() for each in old if each() not in (None, made.inner)] == [made.model]


def test_a_job_that_cannot_change_gets_its_own_model():
    model = Model()
    replicas = ReplicaGroup(Environment(), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = StepRunner(model, optimizer, replicas, LossWeighting(replicas, 4, adaptive=False), None, StepOptions())
    assert made.given is model


def test_a_stand_in_is_the_model_but_for_its_calls():
    model = Model()
    calls: list[str] = []

    def other(*inputs: Any, **kwargs: Any) -> Any:
        calls.append("other")
        return model(*inputs, **kwargs)

    made: Any = stable_handle(model, lambda: other)  # type: ignore[arg-type, return-value]
    assert isinstance(made, Model)
    assert repr(made) == repr(model)
    assert [*made.state_dict()] == ["layer.weight", "layer.bias"]
    assert next(made.parameters()) is model.layer.weight
    made.eval()
    assert not model.training
    made.vocabulary = 12
    made.register_buffer("seen", torch.zeros(1))
    assert (model.vocabulary, model.seen.tolist()) == (12, [0.0])
    assert torch.equal(made.twice(X), model(X) * 2)
    assert calls == ["other", "other"]
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert type(copied) is Model
        assert torch.equal(copied(X), model(X))
    assert calls == ["other", "other"]


def test_a_model_that_cannot_have_one_stands_for_itself():
    model = Unlike()
    assert stable_handle(model, lambda: model) is model


class Hooked(Model):
    """Keeps what its layer gave, through a hook that is a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.layer.register_forward_hook(self.keep)

    def keep(self, layer: Any, inputs: Any, output: Any) -> None:
        self.last = output

    def forward(self, x: Any, times: float = 1.0) -> Any:
        self.layer(x)
        return self.last * times


class Careful(Model):
    """Copies itself in a way of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied


def elsewhere() -> nn.Module:
    raise AssertionError("that is not the model that the script was given")


def through_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", [Model, Hooked, Careful])
@pytest.mark.parametrize("way", [copy.deepcopy, through_torch, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(kind, way):
    model = kind()
    copied = way(stable_handle(model, elsewhere))
    assert type(copied) is kind
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.layer.bias.fill_(3.0)
    assert torch.equal(copied(X), torch.full((2, 1), 3.0))
    assert not torch.equal(model(X), copied(X))


def test_what_is_made_from_its_class_is_a_model_of_its_own():
    handle = stable_handle(Model(), elsewhere)
    assert handle.__class__ is Model
    for kind in (type(handle), handle.__class__):
        other = kind()
        assert torch.equal(other(X), Model.forward(other, X))
        assert torch.equal(copy.deepcopy(other)(X), other(X))
        assert type(pickle.loads(pickle.dumps(other))) is Model
    chain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    assert torch.equal(stable_handle(chain, elsewhere)[:1](X), chain[0](X))


def test_a_parametrization_of_the_model_itself_reaches_it():
    model = nn.Linear(3, 1)
    handle = stable_handle(model, lambda: model)
    parametrize.register_parametrization(handle, "weight", nn.Tanh())
    assert torch.equal(handle(X), nn.functional.linear(X, model.weight, model.bias))
    assert torch.equal(handle.weight, model.weight)


class Listed(Model):
    """Knows all that derives from it."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        cls.known.append(cls.__name__)


def test_a_class_that_knows_who_derives_from_it_is_left_alone():
    model = Listed()
    assert stable_handle(model, elsewhere) is model
    assert Listed.known == []
