"""Several processes as one: numbers gathered, gradients averaged, groups left."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.agent.distributed.environment import Environment, read_environment
from pollux.agent.distributed.process_group import ReplicaGroup, WrappedModel
from pollux.core.errors import InvalidInput

HERE = str(Path(__file__))


def alone() -> ReplicaGroup:
    return ReplicaGroup(Environment(), torch.device("cpu"))


def test_alone_it_opens_nothing():
    threads = threading.active_count()
    made = alone()
    assert (made.is_first, made.num_replicas, made.store, made.control) == (True, 1, None, None)
    model = nn.Linear(1, 1)
    assert made.wrap(model) is model
    assert made.gather([1.0, 2.0]).tolist() == [[1.0, 2.0]]
    assert made.gather_bytes(b"x") == [b"x"]
    assert made.add_up(torch.tensor([3])).tolist() == [3]
    made.require_same("anything", 3)
    made.average_gradients(list(model.parameters()))
    made.broadcast_buffers(model)
    made.close()
    assert threading.active_count() == threads
    assert not dist.is_initialized()


def together() -> dict[str, Any]:
    replicas = ReplicaGroup(read_environment(), torch.device("cpu"), 30.0)
    mine = replicas.replica
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False).double(), nn.Linear(1, 1))
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(mine + number))
    model[2].weight.grad = None
    if mine == 0:
        model[2].bias.grad = None
    replicas.average_gradients(list(model.parameters()))
    gradients = [None if p.grad is None else p.grad.flatten()[0].item() for p in model.parameters()]
    norm: Any = nn.BatchNorm1d(1)
    norm.running_mean.fill_(float(mine))
    replicas.broadcast_buffers(norm)
    result = {
        "numbers": replicas.gather([float(mine), 7.0]),
        "texts": [text.decode() for text in replicas.gather_bytes(b"x" * mine)],
        "sum": replicas.add_up(torch.tensor([2**62, mine], dtype=torch.int64)),
        "gradients": gradients,
        "buffer": norm.running_mean,
        "owns": replicas.owns_group,
    }
    try:
        replicas.require_same("the batch", mine)
    except InvalidInput as error:
        result["refused"] = str(error)
    replicas.close()
    result["left"] = not dist.is_initialized()
    return result


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_together(replica_server, num_replicas):
    for result in replica_server.run(f"{HERE}:together", num_replicas):
        assert result["numbers"] == [[float(replica), 7.0] for replica in range(num_replicas)]
        assert result["texts"] == ["x" * replica for replica in range(num_replicas)]
        ranks = sum(range(num_replicas))
        wrapped = (2**62 * num_replicas + 2**63) % 2**64 - 2**63
        assert result["sum"] == [wrapped, ranks]
        mean = ranks / num_replicas
        # The third has no gradient anywhere and keeps none; the fourth has none on replica 0, where it counts as 0.
        assert result["gradients"] == pytest.approx(
            [mean, mean + 1, None, (ranks + 3 * (num_replicas - 1)) / num_replicas]
        )
        assert result["buffer"] == [0.0]
        assert result["owns"]
        assert result["left"]
        assert "replicas disagree on the batch (0, 1" in result["refused"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.vocabulary = 11

    def forward(self, x):
        return self.layer(x)

    def generate(self):
        return "text"


def wrapped() -> dict[str, Any]:
    replicas = ReplicaGroup(read_environment(), torch.device("cpu"), 30.0)
    model = Model()
    made = replicas.wrap(model)
    assert isinstance(made, WrappedModel)
    before = made.ran
    made(torch.ones(1, 2)).sum().backward()
    result = {"vocabulary": made.vocabulary, "text": made.generate(), "ran": [before, made.ran]}
    try:
        made.nothing  # noqa: B018
    except AttributeError as error:
        result["missing"] = str(error)
    assert "module." not in next(iter(model.state_dict()))
    del made
    replicas.close()
    return result


def test_the_wrapper_answers_for_the_model_inside(replica_server):
    for result in replica_server.run(f"{HERE}:wrapped", 2):
        assert (result["vocabulary"], result["text"], result["ran"]) == (11, "text", [False, True])
        assert "nothing" in result["missing"]


class Spare(Model):
    def __init__(self, layers: int):
        super().__init__()
        self.spare = nn.ModuleList([nn.Linear(2, 2) for _ in range(layers)])


def unused(layers: int) -> str:
    replicas = ReplicaGroup(read_environment(), torch.device("cpu"), 30.0)
    made = replicas.wrap(Spare(layers))
    said = ""
    try:
        for _ in range(2):
            made(torch.ones(1, 2)).sum().backward()
    except InvalidInput as error:
        said = str(error)
    del made
    replicas.close()
    return said


@pytest.mark.parametrize(
    ("layers", "which"),
    [
        (1, "2 of 4 parameters (spare.0.weight, spare.0.bias) had no part in the loss"),
        (3, "6 of 8 parameters (spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, spare.2.weight, ...)"),
    ],
)
def test_parameters_without_a_gradient_are_named_with_the_remedy(replica_server, layers, which):
    for said in replica_server.run(f"{HERE}:unused", 2, {"layers": layers}):
        assert which in said
        assert 'ddp_options={"find_unused_parameters": True}' in said


def test_other_errors_of_a_model_stay_what_they_are(replica_server):
    for said in replica_server.run(f"{HERE}:failing", 2):
        assert said == "mat1 and mat2"


def failing() -> str:
    replicas = ReplicaGroup(read_environment(), torch.device("cpu"), 30.0)
    made = replicas.wrap(Model())
    said = ""
    try:
        made(torch.ones(1, 3))
    except RuntimeError as error:
        said = str(error)[:13]
    del made
    replicas.close()
    return said


def test_who_has_let_go_of_the_others_is_not_with_them():
    made: Any = alone()
    made.num_replicas = 2
    assert not made.are_all_at(3, 10.0)
