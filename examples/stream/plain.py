"""A stream that has no length and no index: predict the next value of a noisy oscillation.

The best that any predictor can do is a mean squared error of 0.01, the variance of the noise.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

WINDOW = 8


class Oscillation(IterableDataset):
    """Windows of x[t] = 1.8·x[t-1] - 0.9·x[t-2] + noise, each with the value that comes next."""

    def __init__(self, length):
        self.length = length
        self.place, self.values, self.noise = 0, [0.0, 0.0], torch.Generator().manual_seed(1)

    def __iter__(self):
        while self.place < self.length:
            while len(self.values) <= WINDOW:
                noise = 0.1 * torch.randn((), generator=self.noise, dtype=torch.float64).item()
                self.values.append(1.8 * self.values[-1] - 0.9 * self.values[-2] + noise)
            window, self.values = torch.tensor(self.values), self.values[1:]
            self.place += 1
            yield window[:-1], window[-1:]
        self.place = 0

    def state_dict(self):
        """Where the stream is: with it, an interrupted job goes on at once instead of reading from the start."""
        return {"place": self.place, "values": list(self.values), "noise": self.noise.get_state()}

    def load_state_dict(self, state):
        """Go on from there."""
        self.place, self.values = state["place"], list(state["values"])
        self.noise.set_state(state["noise"])


def main():
    """Train, and print the mean squared error now and then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--length", type=int, default=20_000, help="windows in an epoch")
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(Oscillation(args.length), batch_size=64)
    model = nn.Sequential(nn.Linear(WINDOW, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    errors = []
    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            errors.append(loss.item())
        print(f"epoch {epoch + 1}: first {errors[0]:.9f}, last 100 {math.fsum(errors[-100:]) / 100:.9f}")


if __name__ == "__main__":
    main()
