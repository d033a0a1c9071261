"""BatchNorm over several replicas as over one batch, fillers left out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pollux.agent.distributed.sync_batchnorm import has_batchnorm, set_counted, synchronise_batchnorm

GROUP: Any = object()
HERE = str(Path(__file__))


def layer(**options) -> nn.BatchNorm1d:
    torch.manual_seed(0)
    made = nn.BatchNorm1d(3, **options).double()
    if made.weight is not None:
        nn.init.uniform_(made.weight)
        nn.init.uniform_(made.bias)
    return made


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(9, 3, generator=generator, dtype=torch.float64) * 3 + 5,
        torch.randn(9, 3, generator=generator, dtype=torch.float64),
    )


def one_replica(options: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """This replica's part of one training step; with 0 samples a filler stands in, which must count nothing."""
    dist.init_process_group("gloo")
    model = layer(**options)
    synchronise_batchnorm(model, dist.group.WORLD)
    x, weights = batch()
    first = sum(sizes[: dist.get_rank()])
    mine = sizes[dist.get_rank()]
    set_counted(model, mine > 0)
    rows = slice(first, first + mine) if mine else slice(0, 1)
    part = x[rows].clone().requires_grad_()
    out = model(part)
    ((out * weights[rows]).sum() * (1.0 if mine else 0.0)).backward()
    result = {
        "out": out if mine else [],
        "gradient": part.grad if mine else [],
        "weight": None if model.weight is None else model.weight.grad,
        "mean": model.running_mean,
        "var": model.running_var,
        "names": list(model.state_dict()),
    }
    dist.destroy_process_group()
    return result


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[5, 4], [9, 0], [4, 3, 2]])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_a_split_batch_is_a_whole_one(replica_server, sizes, options):
    parts = replica_server.run(f"{HERE}:one_replica", len(sizes), {"options": options, "sizes": sizes})
    whole = layer(**options)
    x, weights = batch()
    x.requires_grad_()
    out = whole(x)
    (out * weights).sum().backward()
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(tensor([row for part in parts for row in part["out"]]), out.detach(), **close)
    torch.testing.assert_close(tensor([row for part in parts for row in part["gradient"]]), x.grad, **close)
    if whole.weight is not None:
        summed = sum(tensor(part["weight"]) for part in parts)
        torch.testing.assert_close(summed, whole.weight.grad, **close)
    for part in parts:
        assert part["names"] == list(whole.state_dict())
        if whole.running_mean is not None:
            torch.testing.assert_close(tensor(part["mean"]), whole.running_mean, **close)
            torch.testing.assert_close(tensor(part["var"]), whole.running_var, **close)


def test_fillers_alone_leave_the_statistics_alone(replica_server):
    """The last micro-steps of an accumulated step may have no sample anywhere."""
    for part in replica_server.run(f"{HERE}:one_replica", 2, {"options": {}, "sizes": [0, 0]}):
        assert part["mean"] == [0.0, 0.0, 0.0]
        assert part["var"] == [1.0, 1.0, 1.0]
        assert part["weight"] == [0.0, 0.0, 0.0]


def test_which_models_have_it():
    assert has_batchnorm(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm2d(3)))
    assert not has_batchnorm(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(3)))


def test_the_class_changes_and_changes_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm2d(3))
    group: Any = object()
    assert synchronise_batchnorm(model, group) == 2
    assert synchronise_batchnorm(model, group) == 2
    assert isinstance(model[1], nn.BatchNorm1d)
    assert type(model[1]) is not nn.BatchNorm1d
    assert synchronise_batchnorm(model, None) == 2
    assert (type(model[1]), type(model[2])) == (nn.BatchNorm1d, nn.BatchNorm2d)
    assert not [name for name in vars(model[1]) if name.startswith("pollux")]


def test_a_copy_is_a_plain_layer():
    model = layer()
    synchronise_batchnorm(model, GROUP)
    twin = copy.deepcopy(model)
    assert type(twin) is nn.BatchNorm1d
    assert torch.equal(twin.weight, model.weight)
    assert twin.weight is not model.weight
    twin(torch.randn(4, 3, dtype=torch.float64)).sum().backward()


def test_evaluation_waits_for_nobody():
    model = layer()
    synchronise_batchnorm(model, GROUP)
    with torch.no_grad():
        model(batch()[0])
    model.eval()
    model(batch()[0])


def test_a_plain_layer_uses_its_averages_for_a_filler():
    model: Any = nn.Sequential(layer())
    set_counted(model, False)
    model(torch.ones(1, 3, dtype=torch.float64))
    assert int(model[0].num_batches_tracked) == 0
    set_counted(model, True)
    assert model[0].training
    model.eval()
    set_counted(model, False)
    set_counted(model, True)
    assert not model[0].training, "what was not trained before is not trained after"
