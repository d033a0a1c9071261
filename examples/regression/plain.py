"""Linear regression whose gradient noise is known in closed form.

The data is y = x·w + e with x and e from normal distributions, the loss half the squared error. Under SGD at a
constant rate r and batch M the weights end up wandering about w, at such a distance that the noise scale is
M·(2/r - 1), whatever the number of weights and the size of e.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RATE, BATCH = 0.4, 16


def load(num_samples, num_weights=50):
    """Samples, and the weights that they were made from."""
    weights = torch.randn(num_weights)
    x = torch.randn(num_samples, num_weights)
    return TensorDataset(x, x @ weights + torch.randn(num_samples)), weights


def main():
    """Train, and print how far the weights are from the truth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=40_000)
    args = parser.parse_args()

    torch.manual_seed(0)
    data, truth = load(args.samples)
    model = nn.Linear(len(truth), 1, bias=False)
    model.weight.data[0] = truth  # no long way there, which has another noise scale
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(data, BATCH, shuffle=True)

    for epoch in range(args.epochs):
        for x, y in loader:
            loss = 0.5 * nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: squared distance {(model.weight[0] - truth).square().sum():.4f}")


if __name__ == "__main__":
    main()
