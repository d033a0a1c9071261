"""Handwritten digits on any number of replicas, with a wait that stands for a GPU's computing.

The network is so small that a processor is done with it at once. The wait (a constant for each step and an amount for
each sample, as on a GPU) makes replicas and batches matter; gradients, averages, checkpoints and resizes are real.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import pollux

HELD_OUT = 360


def load(copies: int, seed: int) -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Scikit-learn's digits with noise: `copies` of each to train on, and some that are held out."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the data comes with scikit-learn: pip install scikit-learn")
    # Read from its file: importing the whole package would take longer than a resize.
    table = np.loadtxt(Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz", delimiter=",")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(table), generator=generator)
    x, y = (
        torch.tensor(table[:, :64], dtype=torch.float32)[order] / 16,
        torch.tensor(table[:, 64], dtype=torch.long)[order],
    )
    many, labels = x[HELD_OUT:].repeat(copies, 1), y[HELD_OUT:].repeat(copies)
    noise = 0.4 * torch.randn(many.shape, generator=generator)
    return TensorDataset(many + noise, labels), (x[:HELD_OUT], y[:HELD_OUT])


def main() -> None:
    """Train, and log the accuracy on held-out digits after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--copies", type=int, default=4, help="how often each digit is in the data, with other noise")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--step-wait", type=float, default=0.03, help="seconds for each step, standing for a GPU's start"
    )
    parser.add_argument("--sample-wait", type=float, default=0.0005, help="seconds for each sample, for its computing")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train, (x_test, y_test) = load(args.copies, args.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9)
    job = pollux.init(model, optimizer, train, args.batch_size, max_batch_size=args.max_batch_size, seed=args.seed)
    for epoch in job.epochs(args.epochs):
        for x, y in job.batches():
            loss = nn.functional.cross_entropy(job.model(x), y)
            time.sleep(args.step_wait + args.sample_wait * len(x))
            job.backward(loss)
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        job.log(accuracy=accuracy)
        if job.is_first:
            print(
                f"epoch {epoch + 1}: accuracy {accuracy:.3f}, batch {job.batch_size}, {job.num_replicas} replicas",
                flush=True,
            )
    if job.is_first:
        print(job.receipt.summary())


if __name__ == "__main__":
    main()
