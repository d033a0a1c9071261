"""Exact mode follows plain PyTorch: the loss of every step, at any number of replicas and any accumulation."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pollux
from pollux.agent import pass_order
from pollux.testing.jobs.replica_server import load_module

HERE = str(Path(__file__))
MATRIX = load_module(str(Path(__file__).parents[3] / "benchmarks" / "agent_exact.py"))
BARS = {"float64": 1e-12, "float32": 1e-6}


def too_far(chosen, replica_server):
    compared = MATRIX.compare(chosen, replica_server)
    return {case.name: difference for case, difference in compared if not difference <= BARS[case.dtype]}


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_losses_are_those_of_plain_pytorch(replica_server, num_replicas):
    """A third of the matrix, with some of everything."""
    chosen = [case for case in MATRIX.few(MATRIX.cases(full=False)) if case.num_replicas == num_replicas]
    assert len({case.optimizer for case in chosen}) > 1
    assert too_far(chosen, replica_server) == {}


@pytest.mark.long
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_losses_of_the_whole_matrix_are_those_of_plain_pytorch(replica_server, num_replicas):
    chosen = [case for case in MATRIX.cases(full=False) if case.num_replicas == num_replicas]
    assert {case.optimizer for case in chosen} == set(MATRIX.OPTIMIZERS)
    assert {case.accumulation for case in chosen} == {0, 1, 2}
    assert too_far(chosen, replica_server) == {}


def test_the_matrix_has_every_task_option_and_at_least_50_steps():
    chosen = MATRIX.cases(full=False)
    assert {case.task for case in chosen} == {*MATRIX.TASKS, "batchnorm"}
    assert {(case.clip, case.schedule) for case in chosen} >= {(True, "step"), (False, "epoch"), (True, "")}
    assert len(MATRIX.plain_losses(chosen[0])) >= 50


def test_the_quick_choice_still_has_some_of_everything():
    whole = MATRIX.cases(full=False)
    chosen = MATRIX.few(whole)
    assert len(chosen) < len(whole) / 2
    for name in ("num_replicas", "accumulation", "optimizer", "task", "dtype", "clip", "schedule"):
        assert {getattr(case, name) for case in chosen} == {getattr(case, name) for case in whole}, name


def test_a_wrong_average_would_be_seen():
    case = MATRIX.Case(1, 0, "sgd", "mlp")
    losses = MATRIX.plain_losses(case)
    parts = [[[loss, 1.0] for loss in losses]]
    assert MATRIX.relative_difference(case, losses, parts) == 0.0
    parts[0][30][0] *= 1.0 + 1e-10
    assert MATRIX.relative_difference(case, losses, parts) > BARS["float64"]


class Images(nn.Module):
    """BatchNorm over images, with a cumulative average in one layer and none in another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3, momentum=None)
        self.second = nn.Conv2d(3, 4, 2)
        self.plain = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.head(torch.tanh(self.plain(self.second(hidden))).mean((2, 3)))


def images() -> tuple[Any, torch.utils.data.TensorDataset]:
    torch.manual_seed(3)
    model = Images().double()
    data = torch.utils.data.TensorDataset(torch.randn(23, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (23,)))
    return model, data


def image_job(sync: bool = True, accumulation: int = 0) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, data = images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = pollux.init(model, optimizer, data, 7, sync_batchnorm=sync, accumulation=accumulation)
    for _ in job.epochs(3):
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
    model.eval()
    with torch.no_grad():
        scores = job.model(data.tensors[0])
    receipt = job.receipt.to_json()
    job.close()
    return {
        "scores": scores,
        "mean": model.norm.running_mean,
        "var": model.norm.running_var,
        "tracked": int(model.norm.num_batches_tracked),
        "exact": receipt["exact"],
        "because": receipt["not_exact_because"],
    }


def plain_images() -> Any:
    model, data = images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        for indices in pass_order(23, 0, number).split(7):
            x, y = data[indices]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def floats(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_running_statistics_of_batchnorm_are_those_of_the_whole_batch(replica_server, num_replicas):
    results = replica_server.run(f"{HERE}:image_job", num_replicas)
    model = plain_images()
    with torch.no_grad():
        scores = model(images()[1].tensors[0])
    for result in results:
        assert result["exact"]
        assert result["tracked"] == 12
        torch.testing.assert_close(floats(result["mean"]), model.norm.running_mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(floats(result["var"]), model.norm.running_var, rtol=1e-12, atol=0)
        torch.testing.assert_close(floats(result["scores"]), scores, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("num_replicas", "arguments", "cause"),
    [
        (1, {"accumulation": 1}, "accumulation"),
        (2, {"accumulation": 1}, "accumulation"),
        (2, {"sync": False}, "unsynchronised replicas"),
    ],
)
def test_batchnorm_over_parts_is_said_once_and_marked(replica_server, num_replicas, arguments, cause):
    running = replica_server.start(f"{HERE}:image_job", num_replicas, arguments)
    for result in running.wait():
        assert result.exit_code == 0, result.output
        assert result.value["exact"] is False
        assert len(result.value["because"]) == 1
        assert cause in result.value["because"][0]
        assert result.output.count("not exact: BatchNorm") == 1


def test_a_filler_does_not_move_the_statistics_of_batchnorm(replica_server):
    """The last batch has 2 samples: of 4 replicas the last two have fillers, alone they would be refused."""
    results = replica_server.run(f"{HERE}:image_job", 4, {"sync": False})
    assert [result["tracked"] for result in results] == [12, 12, 12, 12], "replica 0's, for all"
    assert all(math.isfinite(value) for result in results for row in result["scores"] for value in row)


def test_unsynchronised_replicas_end_an_epoch_with_the_same_statistics(replica_server):
    first, second = replica_server.run(f"{HERE}:image_job", 2, {"sync": False})
    assert first["mean"] == second["mean"]
    assert first["scores"] == second["scores"]


class Odd(nn.Module):
    """An embedding with sparse gradients, or frozen, or a layer that is never used."""

    def __init__(self, kind: str):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, sparse=kind == "sparse")
        self.head = nn.Linear(6, 3)
        self.embedding.weight.requires_grad_(kind != "frozen")
        if kind == "unused":
            self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x)).mean(1))


def odd_job(kind: str, weighted: bool = False, **options) -> list[float]:
    """This replica's part of every micro-step's loss."""
    torch.manual_seed(0)
    model = Odd(kind).double()
    data = torch.utils.data.TensorDataset(torch.randint(0, 20, (33, 4)), torch.randint(0, 3, (33,)))
    job = pollux.init(model, torch.optim.SGD(model.parameters(), lr=0.5), data, 8, **options)
    parts = []
    for _ in job.epochs(3):
        for x, y in job.batches():
            micro: Any = job._parts.engine._micro
            loss = F.cross_entropy(job.model(x), y)
            if micro.index == 0:
                parts.append(0.0)
            parts[-1] += float(loss.detach()) * micro.samples / micro.total
            job.backward(loss, weight=float(len(x)) if weighted else None)
    job.close()
    return parts


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sparse", {}),
        ("sparse", {"weighted": True}),
        ("frozen", {"accumulation": 1}),
        ("unused", {"ddp_options": {"find_unused_parameters": True}}),
        ("plain", {"ddp_options": {"static_graph": True}}),
        ("plain", {"ddp_options": {"static_graph": True}, "accumulation": 2}),
        ("plain", {"measure_noise": True}),
        ("plain", {"measure_noise": True, "accumulation": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_odd_models_and_options(replica_server, kind, options):
    (alone,) = replica_server.run(f"{HERE}:odd_job", 1, {"kind": kind})
    together = replica_server.run(f"{HERE}:odd_job", 2, {"kind": kind, **options})
    losses = [sum(parts) for parts in zip(*together, strict=True)]
    torch.testing.assert_close(floats(losses), floats(alone), rtol=1e-12, atol=0)
