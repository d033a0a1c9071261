"""Two small learning tasks with held-out quality, for `agent_quality`: digits with SGD, characters with AdamW.

What is compared on them is in `agent_quality`. Both run on one core in seconds, and neither needs a download.
"""

from __future__ import annotations

import ast
import collections
import math
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SPLIT_SEED = 20_21  # the split into training and held-out data is the same in all runs
DIGITS_HELD_OUT = 500
DIGITS_NOISE = 0.3
DIGITS_COPIES = 64
CONTEXT = 8
TEXT_CHARACTERS = 1_500_000
RARE = 0.005


class Indices(Dataset[int]):
    """What the job deals out is the numbers of samples; a task makes the samples of them, a batch at a time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train for `epochs` × `size` samples of progress; `metric` is the one that is judged, lower is better.

    `schedule(done)` is the factor of the learning rate at that part of the training. Efficiency is measured after
    `probe_steps` steps at the initial batch, over `probe_span` more.
    """

    name: str
    optimiser: str
    metric: str
    initial_batch: int
    size: int
    epochs: int
    probe_steps: int
    probe_span: int
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[float], float]
    loss: Callable[[nn.Module, Tensor], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    training_loss: Callable[[nn.Module], float]


def cosine(done: float) -> float:
    return 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def warm_cosine(done: float) -> float:
    return min(20.0 * done + 0.01, 1.0) * cosine(done)


def digits_task(quick: bool) -> Task:
    """Scikit-learn's digits, shifted by up to a pixel and with noise added anew each time a sample is drawn.

    Fresh noise matters: on a fixed set, a larger batch needs more passes for the same progress, and would be compared
    by how much it learns by heart.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    order = torch.randperm(len(loaded.target), generator=generator)
    shifted = _shifts(torch.tensor(loaded.data, dtype=torch.float32).reshape(-1, 8, 8)[order] / 16.0)
    labels = torch.tensor(loaded.target)[order]
    training, answers = shifted[DIGITS_HELD_OUT:], labels[DIGITS_HELD_OUT:]
    held_out, held_out_answers = shifted[:DIGITS_HELD_OUT], labels[:DIGITS_HELD_OUT]

    def draw(images: Tensor, which: Tensor, generator: torch.Generator | None = None) -> Tensor:
        shift = torch.randint(0, images.shape[1], (len(which),), generator=generator)
        chosen = images[which, shift]
        return chosen + DIGITS_NOISE * torch.randn(chosen.shape, generator=generator)

    def fixed(images: Tensor, targets: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        which = torch.arange(len(images)).repeat(copies)
        return draw(images, which, generator), targets[which]

    inputs, targets = fixed(held_out, held_out_answers, 8)
    known_inputs, known_targets = fixed(training, answers, 6)

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        which = index % len(training)
        return F.cross_entropy(model(draw(training, which)), answers[which])

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            logits = model(inputs)
            wrong = (logits.argmax(1) != targets).float().mean().item()
            return {"loss": F.cross_entropy(logits, targets).item(), "error_percent": 100.0 * wrong}

    def training_loss(model: nn.Module) -> float:
        with torch.no_grad():
            return F.cross_entropy(model(known_inputs), known_targets).item()

    return Task(
        name="digits", optimiser="SGD", metric="loss", initial_batch=64, size=DIGITS_COPIES * len(training),
        epochs=1 if quick else 6, probe_steps=500, probe_span=256 if quick else 2048,
        build=lambda: nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.025, momentum=0.9, weight_decay=1e-4),
        schedule=cosine, loss=loss, evaluate=evaluate, training_loss=training_loss,
    )  # fmt: skip


def _shifts(images: Tensor) -> Tensor:
    """Each image in its nine places, flattened: n × 9 × 64."""
    padded = F.pad(images, (1, 1, 1, 1))
    places = [padded[:, row : row + 8, column : column + 8] for row in range(3) for column in range(3)]
    return torch.stack(places, 1).flatten(2)


def text_task(quick: bool) -> Task:
    """The next character from the eight before it, in the documentation strings of Python's own standard library."""
    windows, symbols = _windows(stdlib_text(TEXT_CHARACTERS))
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    cut = len(windows) * 11 // 12
    # The end of the text is held out, with a gap, so that no window of it overlaps one of the training part.
    held_out = windows[cut + CONTEXT + 1 :]
    held_out = held_out[torch.randperm(len(held_out), generator=generator)[:20_000]].contiguous()
    size = min(512_000, cut)
    training = windows[torch.randperm(cut, generator=generator)[:size]].contiguous()

    def cross_entropy(model: nn.Module, rows: Tensor) -> Tensor:
        return F.cross_entropy(model(rows[:, :-1]), rows[:, -1])

    def bits(model: nn.Module, rows: Tensor) -> float:
        with torch.no_grad():
            return cross_entropy(model, rows).item() / math.log(2.0)

    return Task(
        name="text", optimiser="AdamW", metric="bits_per_character", initial_batch=128,
        size=size // 4 if quick else size, epochs=1 if quick else 2, probe_steps=600,
        probe_span=256 if quick else 2048,
        build=lambda: nn.Sequential(
            nn.Embedding(symbols, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.GELU(), nn.Linear(64, 64),
            nn.GELU(), nn.Linear(64, symbols),
        ),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.99), weight_decay=0.01),
        schedule=warm_cosine, loss=lambda model, index: cross_entropy(model, training[index]),
        evaluate=lambda model: {"bits_per_character": bits(model, held_out)},
        training_loss=lambda model: bits(model, training[:8_000]),
    )  # fmt: skip


def stdlib_text(characters: int) -> str:
    """Documentation strings of the standard library's sources, module after module, up to that many characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[str] = []
    found = 0
    for path in sorted(root.rglob("*.py")):
        if found >= characters:
            break
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts):
            new = list(_docstrings(path))
            parts += new
            found += sum(len(text) for text in new)
    return "\n".join(parts)[:characters]


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _windows(text: str) -> tuple[Tensor, int]:
    """All stretches of CONTEXT + 1 characters as numbers, and how many numbers; rare characters share number 0."""
    plain = " ".join(text.lower().split())
    counts = collections.Counter(plain)
    common = sorted(character for character, count in counts.items() if count > RARE * len(plain))
    number = {character: index for index, character in enumerate(common, start=1)}
    return torch.tensor([number.get(character, 0) for character in plain]).unfold(0, CONTEXT + 1, 1), len(common) + 1
