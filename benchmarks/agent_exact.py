"""Exact mode against plain PyTorch: the loss of every step, at 1 to 4 replicas, with and without accumulation.

    python benchmarks/agent_exact.py [--quick] [--seed N]

The reference is one process that takes the same samples in the same order (`pollux.agent.pass_order`), whole batch by
whole batch. Datasets do not divide by the batch nor the batch by the replicas, so that parts are uneven, and the last
batch of a pass is smaller than the number of replicas.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pollux
from pollux.agent import pass_order
from pollux.testing.jobs.replica_server import ReplicaServer

BATCH = 13
PASSES = 9
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
TASKS = ("mlp", "transformer", "tokens", "sum", "logits")
CLIP_NORM = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; `size` samples in batches of 13 leave a last one of 1 (or 2 for BatchNorm)."""

    num_replicas: int
    accumulation: int
    optimizer: str
    task: str
    dtype: str = "float64"
    clip: bool = False
    schedule: str = ""
    seed: int = 0

    @property
    def size(self) -> int:
        return 67 if self.task == "batchnorm" else 66

    @property
    def name(self) -> str:
        extras = [word for word in ("clip" if self.clip else "", self.schedule) if word]
        return "-".join(
            [self.task, self.optimizer, self.dtype, f"{self.num_replicas}x{self.accumulation + 1}", *extras]
        )


class Sequences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 1 to 7 tokens, each with the token that follows."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        lengths = torch.randint(1, 8, (size,), generator=generator).tolist()
        texts = [torch.randint(1, 11, (length + 1,), generator=generator) for length in lengths]
        self.pairs = [(text[:-1], text[1:]) for text in texts]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences side by side; 0 where there is no token."""
    pad = nn.utils.rnn.pad_sequence
    return pad([x for x, _ in samples], batch_first=True), pad([y for _, y in samples], batch_first=True)


class Transformer(nn.Module):
    """One layer with attention; scores for a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(self.embedding(tokens)).mean(1))
        return scores


class PerToken(nn.Module):
    """Scores for every token by itself, so that padding changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.inner = nn.Linear(8, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(F.gelu(self.inner(self.embedding(tokens))))
        return scores


def build(case: Case) -> tuple[nn.Module, Any]:
    """Model and dataset, the same for the same case."""
    torch.manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed + 1)
    if case.task == "tokens":
        return PerToken().to(dtype), Sequences(case.size, generator)
    if case.task == "transformer":
        tokens = torch.randint(1, 11, (case.size, 5), generator=generator)
        labels = torch.randint(0, 11, (case.size,), generator=generator)
        return Transformer().to(dtype), torch.utils.data.TensorDataset(tokens, labels)
    inputs = torch.randn(case.size, 6, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 4, (case.size,), generator=generator)
    first: list[nn.Module] = [nn.Linear(6, 12)]
    if case.task == "batchnorm":
        first.append(nn.BatchNorm1d(12))
    model = nn.Sequential(*first, nn.Tanh(), nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    if case.task == "logits":
        targets = torch.randn(case.size, 4, generator=generator, dtype=torch.float64).to(dtype)
        return model, torch.utils.data.TensorDataset(inputs, targets)
    return model, torch.utils.data.TensorDataset(inputs, labels)


def loss_of(case: Case, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, float | None]:
    """The loss of a batch, and its weight where it is a mean over tokens."""
    if case.task == "tokens":
        scores = model(x)
        mask = x > 0
        return F.cross_entropy(scores[mask], y[mask]), float(mask.sum())
    if case.task == "sum":
        return F.cross_entropy(model(x), y, reduction="sum"), None
    if case.task == "logits":
        return F.mse_loss(model(x), y), None
    return F.cross_entropy(model(x), y), None


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    # A sum is larger by the batch, so its steps are made smaller.
    factor = 1.0 / BATCH if case.task == "sum" else 1.0
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.1 * factor, momentum=0.9, weight_decay=1e-4)
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05)
    return torch.optim.Adagrad(parameters, lr=0.05)


def scheduler_of(case: Case, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
    if case.schedule == "step":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    if case.schedule == "epoch":
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return None


def plain_losses(case: Case) -> list[float]:
    """The loss of every step of plain PyTorch in one process."""
    model, dataset = build(case)
    optimizer = optimizer_of(case, model)
    scheduler = scheduler_of(case, optimizer)
    collate = padded if case.task == "tokens" else torch.utils.data.default_collate
    losses = []
    for number in range(PASSES):
        for indices in pass_order(case.size, case.seed, number).split(BATCH):
            x, y = collate([dataset[index] for index in indices.tolist()])
            optimizer.zero_grad()
            loss, _ = loss_of(case, model, x, y)
            loss.backward()
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            losses.append(float(loss.detach()))
            if scheduler is not None and case.schedule == "step":
                scheduler.step()
        if scheduler is not None and case.schedule == "epoch":
            scheduler.step()
    return losses


def job_losses(case: Case) -> list[list[float]]:
    """This replica's part in every step's loss: [what it adds to the sum, what it adds to the weight]."""
    model, dataset = build(case)
    optimizer = optimizer_of(case, model)
    job = pollux.init(
        model,
        optimizer,
        dataset,
        BATCH,
        accumulation=case.accumulation,
        clip_norm=CLIP_NORM if case.clip else None,
        lr_scheduler=scheduler_of(case, optimizer),
        schedule_every=case.schedule or "step",
        seed=case.seed,
        collate_fn=padded if case.task == "tokens" else None,
        stop_signals=(),
    )
    steps: list[list[float]] = []
    for _ in job.epochs(PASSES):
        for x, y in job.batches():
            micro = job._parts.engine._micro
            assert micro is not None
            loss, weight = loss_of(case, job.model, x, y)
            if micro.index == 0:
                steps.append([0.0, 0.0])
            if micro.samples:
                part = weight if weight is not None else 1.0 if case.task == "sum" else float(micro.samples)
                steps[-1][0] += float(loss.detach()) * part
                steps[-1][1] += part if case.task != "sum" else 0.0
            job.backward(loss, reduction="sum" if case.task == "sum" else "mean", weight=weight)
        ledger = job.ledger()
        assert ledger.is_complete, f"{case.name}: a pass left {ledger}"
    assert job.is_exact
    job.close()
    return steps


def replica(cases: Sequence[dict[str, Any]]) -> list[list[list[float]]]:
    """What each replica runs: all cases of one number of replicas, in one process group."""
    torch.set_num_threads(1)
    num_replicas = cases[0]["num_replicas"]
    if num_replicas > 1:
        dist.init_process_group("gloo")
    return [job_losses(Case(**case)) for case in cases]


def relative_difference(case: Case, plain: Sequence[float], parts: Sequence[Sequence[Sequence[float]]]) -> float:
    """The largest relative difference of a step's loss; `parts` by replica and step."""
    worst = 0.0
    if any(len(steps) != len(plain) for steps in parts):
        raise AssertionError(f"{case.name}: {[len(steps) for steps in parts]} steps instead of {len(plain)}")
    for number, expected in enumerate(plain):
        value = sum(steps[number][0] for steps in parts)
        weight = sum(steps[number][1] for steps in parts) if case.task != "sum" else 1.0
        worst = max(worst, abs(value / weight - expected) / max(abs(expected), 1e-30))
    return worst


def compare(cases: Iterable[Case], server: ReplicaServer) -> Iterator[tuple[Case, float]]:
    """Every case with its largest relative difference; cases of one number of replicas share their processes."""
    known: dict[Case, list[float]] = {}
    by_replicas: dict[int, list[Case]] = {}
    for case in cases:
        by_replicas.setdefault(case.num_replicas, []).append(case)
    for num_replicas, group in sorted(by_replicas.items()):
        arguments = {"cases": [asdict(case) for case in group]}
        parts = server.run(f"{__file__}:replica", num_replicas, arguments, timeout=30.0 + 10.0 * len(group))
        for number, case in enumerate(group):
            key = replace(case, num_replicas=1, accumulation=0)
            if key not in known:
                known[key] = plain_losses(key)
            yield case, relative_difference(case, known[key], [results[number] for results in parts])


def cases(full: bool, seed: int = 0) -> list[Case]:
    """The matrix. Unless `full`, one task for each (replicas, accumulation, optimiser), and fewer in float32."""
    chosen: list[Case] = []
    extras = [(clip, schedule) for clip in (False, True) for schedule in ("", "step", "epoch")]
    shapes = itertools.product((1, 2, 3, 4), (0, 1, 2), enumerate(OPTIMIZERS), enumerate(TASKS))
    for number, (num_replicas, accumulation, (row, optimizer), (column, task)) in enumerate(shapes):
        turn = (row + accumulation + num_replicas) % len(TASKS)
        clip, schedule = extras[number % len(extras)]
        case = Case(num_replicas, accumulation, optimizer, task, "float64", clip, schedule, seed)
        if full or column == turn:
            chosen.append(case)
        if full or (column == turn and row == (num_replicas + accumulation) % len(OPTIMIZERS)):
            chosen.append(replace(case, dtype="float32"))
    for num_replicas, (row, optimizer) in itertools.product((1, 2, 3, 4), enumerate(OPTIMIZERS)):
        clip, schedule = extras[(2 * row + num_replicas) % len(extras)]
        chosen.append(Case(num_replicas, 0, optimizer, "batchnorm", "float64", clip, schedule, seed))
    return chosen


def few(chosen: Sequence[Case]) -> list[Case]:
    """Every third case; each number of replicas, accumulation, optimiser and task is still there, and both types."""
    return list(chosen[::3])


def measure(quick: bool, seed: int) -> dict[str, Any]:
    """The worst relative difference of any step of any case, by type; and how many cases there were."""
    worst = {"float64": 0.0, "float32": 0.0}
    where = {"float64": "", "float32": ""}
    chosen = few(cases(full=False, seed=seed)) if quick else cases(full=True, seed=seed)
    with ReplicaServer([__file__]) as server:
        for case, difference in compare(chosen, server):
            if difference >= worst[case.dtype]:
                worst[case.dtype], where[case.dtype] = difference, case.name
    return {
        "exact_max_rel_diff_float64": worst["float64"],
        "exact_max_rel_diff_float32": worst["float32"],
        "exact_worst_case": where,
        "exact_cases": len(chosen),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(options.quick, options.seed)))
