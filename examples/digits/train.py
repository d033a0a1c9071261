"""Handwritten digits, shifted and noisy: a small network, SGD with momentum."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pollux  # 1


def noisy(images, labels):
    """Eighteen copies of each image, shifted by up to a pixel and covered with noise."""
    shifts = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)] * 2
    x = torch.cat([images.roll(shift, (1, 2)) for shift in shifts])
    return TensorDataset((x + 0.2 * torch.randn(x.shape)).unsqueeze(1), labels.repeat(len(shifts)))


def load():
    """27,000 images of 8 × 8 pixels to train on, and 5,346 to test on."""
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    x, y = torch.tensor(digits.images, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
    return noisy(x[:1500], y[:1500]), noisy(x[1500:], y[1500:])


def build():
    """A network with two hidden layers, for ten classes."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def accuracy(model, dataset):
    """The share of images that the model names rightly."""
    x, y = (tensor.to(next(model.parameters()).device) for tensor in dataset.tensors)
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    """Train, and print the accuracy on the test images after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-batch-size", type=int)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = load()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    job = pollux.init(model, optimizer, train, args.batch_size, max_batch_size=args.max_batch_size)  # 2

    for epoch in job.epochs(args.epochs):  # 3
        for x, y in job.batches():  # 4
            job.backward(nn.functional.cross_entropy(job.model(x), y))  # 5
        if job.is_first:
            print(f"epoch {epoch + 1}: accuracy {accuracy(model, test):.3f}")
    if job.is_first:
        print(job.receipt.summary())


if __name__ == "__main__":
    main()
