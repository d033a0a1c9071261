"""A character language model of documentation: a GRU, AdamW, warm-up and decay, clipping."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

DOCS = Path(__file__).resolve().parents[2] / "docs"
LONGEST, PADDING = 100, 0


def load(folder):
    """The lines of all Markdown files as tensors of characters: to train on, and every tenth to test on."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).rglob("*.md")))
    codes = {character: number for number, character in enumerate(sorted(set(text)), start=1)}
    lines = [line[:LONGEST] + "\n" for line in text.splitlines() if len(line) > 1]
    samples = [torch.tensor([codes[character] for character in line]) for line in lines]
    test = samples[::10]
    del samples[::10]
    return samples, test, len(codes) + 1


def pad(lines):
    """Lines of different lengths as one tensor: each character but the last, and what comes after it."""
    padded = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PADDING)
    return padded[:, :-1], padded[:, 1:]


class Model(nn.Module):
    """Reads a line character by character, and says which comes next."""

    def __init__(self, size):
        super().__init__()
        self.embedding = nn.Embedding(size, 32)
        self.memory = nn.GRU(32, 96, batch_first=True)
        self.next = nn.Linear(96, size)

    def forward(self, x):
        """A score for each character at each place."""
        return self.next(self.memory(self.embedding(x))[0])


def mean_loss(model, x, y):
    """Cross entropy per character, in nats; padding does not count."""
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)


@torch.no_grad()
def bits(model, lines):
    """Bits per character on other lines."""
    x, y = (tensor.to(next(model.parameters()).device) for tensor in pad(lines))
    return mean_loss(model, x, y).item() / 0.6931


def main():
    """Train, and print the bits per character on the test lines after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--text", default=DOCS, help="folder of Markdown files")
    args = parser.parse_args()

    torch.manual_seed(0)
    lines, test, size = load(args.text)
    loader = DataLoader(lines, batch_size=16, shuffle=True, collate_fn=pad)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs=args.epochs, steps_per_epoch=len(loader))

    for epoch in range(args.epochs):
        for x, y in loader:
            loss = mean_loss(model, x.to(device), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}: {bits(model, test):.3f} bits per character")


if __name__ == "__main__":
    main()
