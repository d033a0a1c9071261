"""Jobs with habits of plain PyTorch scripts, and what plain PyTorch makes of them. Not a test.

The script steps its own schedulers, freezes and unfreezes parameters, and adds parameter groups on the way.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import pollux
from pollux.agent.data.permutation import pass_order

SIZE, BATCH, EPOCHS = 98, 12, 12
# What a script does only once, it does before this epoch; resizes come later.
HABITUAL = 4


def task(habit: str) -> tuple[nn.Sequential, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    data = TensorDataset(torch.randn(SIZE, 6, dtype=torch.float64), torch.randint(0, 3, (SIZE,)))
    if habit in ("unfreeze", "add a group"):
        model[2].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad or habit == "unfreeze"]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=0.9), data


def schedule(habit: str, optimizer: torch.optim.Optimizer) -> Any:
    """The scheduler of the script, which nobody hands over."""
    kinds = {
        "by step": lambda: lr_scheduler.StepLR(optimizer, 5, 0.9),
        "by epoch": lambda: lr_scheduler.ExponentialLR(optimizer, 0.7),
        "by metric": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0, factor=0.8),
        "in sequence": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6), lr_scheduler.CosineAnnealingLR(optimizer, 60)],
            milestones=[6],
        ),
    }
    return kinds[habit]() if habit in kinds else None


def between_epochs(habit: str, epoch: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """What the script does before an epoch, and only then."""
    if habit == "freeze" and epoch == 3:
        model[0].requires_grad_(False)
    if habit == "unfreeze" and epoch == 3:
        model[2].requires_grad_(True)
    if habit == "add a group" and epoch == 3:
        model[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.03})


def after_epoch(habit: str, scheduler: Any, value: float) -> None:
    if habit == "by epoch":
        scheduler.step()
    elif habit == "by metric":
        scheduler.step(value)


def measure(model: nn.Module, data: TensorDataset) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(data.tensors[0]), data.tensors[1]))


def rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def plain(habit: str) -> dict[str, Any]:
    """What plain PyTorch makes of it."""
    model, optimizer, data = task(habit)
    scheduler, rates = schedule(habit, optimizer), []
    for number in range(EPOCHS):
        between_epochs(habit, number, model, optimizer)
        for indices in pass_order(SIZE, 0, number).split(BATCH):
            x, y = data[indices]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if habit in ("by step", "in sequence"):
                scheduler.step()
        after_epoch(habit, scheduler, measure(model, data))
        rates.append(rate(optimizer))
    return {"parameters": numbers(model), "rates": rates}


def numbers(model: nn.Module) -> list[float]:
    return [float(value) for value in torch.cat([each.detach().reshape(-1) for each in model.parameters()])]


def train(folder: str, habit: str, by_hand: bool = False, **options: Any) -> dict[str, Any]:
    """One replica; slow until the file `fast` is there. `by_hand`: the script sets the rate by a count of its own."""
    model, optimizer, data = task(habit)
    scheduler, rates = schedule(habit, optimizer), []
    job = pollux.init(model, optimizer, data, BATCH, seed=0, **options)
    own_count = 0
    for number in job.epochs(EPOCHS):
        between_epochs(habit, number, model, optimizer)
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
            if habit in ("by step", "in sequence"):
                scheduler.step()
            own_count += 1
            if by_hand:
                optimizer.param_groups[0]["lr"] = 0.1 * 0.99**own_count
            time.sleep(0 if number < HABITUAL or Path(folder, "fast").exists() else 0.5)
        after_epoch(habit, scheduler, measure(model, data))
        rates.append(rate(optimizer))
        if job.is_first:
            Path(folder, f"epoch-{number}").touch()
    seen = {"parameters": numbers(model), "rates": rates, "exact": job.is_exact, "replicas": job.num_replicas}
    job.close()
    return seen


def resumed(folder: str) -> list[bool]:
    """Another start in that folder, whose script freezes another layer by itself."""
    model, optimizer, data = task("none")
    model[4].requires_grad_(False)
    job = pollux.init(model, optimizer, data, BATCH, seed=0, checkpoint_dir=folder)
    job.close()
    return [each.requires_grad for each in model.parameters()]


def freezes(folder: str) -> None:
    """A job that freezes its first layer on the way, and ends early."""
    model, optimizer, data = task("none")
    job = pollux.init(model, optimizer, data, BATCH, seed=0, checkpoint_dir=folder)
    for number in job.epochs(4):
        if number == 2:
            model[0].requires_grad_(False)
        for x, y in job.batches():
            job.backward(F.cross_entropy(job.model(x), y))
    job.close()
