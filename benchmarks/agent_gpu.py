"""Step-time overhead of the agent on a GPU, against the same loop in plain PyTorch, in interleaved blocks.

Part of `agent.py --gpu`. Needs a GPU and torchvision (for ResNet-50).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import pollux
from pollux.agent import initialize

# So small that the noise scale stays where it is while the blocks run; the time of a step does not depend on it.
LEARNING_RATE = 1e-6
BARS = {"exact": 0.003, "adaptive": 0.01}
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Indices(Dataset[int]):
    """The samples lie on the GPU; what travels is their number, so that no loop waits for data."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Transformer(nn.Module):
    """GPT-2 small's shape: 12 layers of width 768, 12 heads, tied embedding of 50,304 tokens."""

    def __init__(self, vocabulary: int = 50_304, width: int = 768, layers: int = 12, length: int = 1024) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass
class Task:
    """A model, its optimiser and loss, and samples that can be learned, so that gradients have a direction."""

    name: str
    batch: int
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    loss: Callable[[nn.Module, Tensor], Tensor]
    size: int = 65_536


def language_task(seed: int) -> Task:
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = torch.zeros(4096, 1025, dtype=torch.long, device="cuda")
    tokens[:, 0] = torch.randint(0, 512, (4096,), device="cuda", generator=generator)
    following = torch.randint(0, 512, (512, 4), device="cuda", generator=generator)
    for place in range(1, 1025):
        choice = torch.randint(0, 4, (4096,), device="cuda", generator=generator)
        tokens[:, place] = following[tokens[:, place - 1], choice]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Transformer().cuda()
        return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        rows = tokens[index % len(tokens)]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(rows[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    return Task("gpt2-small 16x1024 bf16 AdamW", 16, build, loss)


def image_task(seed: int) -> Task:
    from torchvision.models import resnet50

    generator = torch.Generator("cuda").manual_seed(seed)
    # Frequent classes and rare ones: gradients then have a direction from the first step on.
    shares = 1.0 / torch.arange(1, 101, device="cuda", dtype=torch.float32)
    labels = torch.multinomial(shares, 1024, replacement=True, generator=generator)
    patterns = torch.randn(100, 3, 14, 14, device="cuda", generator=generator)
    noise = torch.randn(1024, 3, 224, 224, device="cuda", generator=generator)
    images = F.interpolate(patterns[labels], size=224) + noise
    images = images.to(memory_format=torch.channels_last, dtype=torch.bfloat16)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = resnet50(num_classes=100).cuda().to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4)

    def loss(model: nn.Module, index: Tensor) -> Tensor:
        rows = index % len(images)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(images[rows]), labels[rows])

    return Task("resnet-50 256 bf16 SGD", 256, build, loss)


def plain_steps(task: Task) -> Iterator[None]:
    model, optimizer = task.build()
    loader = DataLoader(Indices(task.size), task.batch, shuffle=True)
    while True:
        for index in loader:
            loss = task.loss(model, index.to("cuda", non_blocking=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def agent_steps(task: Task, holder: dict[str, Any], name: str, **options: Any) -> Iterator[None]:
    model, optimizer = task.build()
    job = pollux.init(model, optimizer, Indices(task.size), task.batch, **options)
    initialize._deactivate()  # several jobs beside each other, for this comparison only
    holder[name] = job
    for _ in job.epochs(1_000_000):
        for index in job.batches():
            before = job.step
            job.backward(task.loss(job.model, index))
            if job.step != before:
                yield


def seconds_of(steps: Iterator[None], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def interval(ratios: list[float], seed: int, draws: int = 4000) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor(ratios, dtype=torch.float64)
    picks = torch.randint(0, len(ratios), (draws, len(ratios)), generator=generator)
    medians = values[picks].median(dim=1).values
    low, high = torch.quantile(medians, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistics.median(ratios), low, high


def kernels(steps: Iterator[None], count: int) -> dict[str, float]:
    """Kernels, host synchronisations and copies to the host of a step, from the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            next(steps)
        torch.cuda.synchronize()
    events = profile.events() or []
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "kernels": sum("Mem" not in event.name for event in on_gpu) / count,
        "copies_to_host": sum("DtoH" in event.name for event in on_gpu) / count,
        "synchronisations": (sum(event.name in SYNCHRONISING for event in events) - 1) / count,
    }


def measure_task(task: Task, pairs: int, block: int, seed: int) -> dict[str, Any]:
    holder: dict[str, Any] = {}
    loops = {
        "plain": plain_steps(task),
        "exact": agent_steps(task, holder, "exact"),
        "adaptive": agent_steps(task, holder, "adaptive", max_batch_size=task.batch),
    }
    for steps in loops.values():
        seconds_of(steps, 5)
    burst: dict[str, list[float]] = {"adaptive": [], "plain": []}
    while holder["adaptive"].noise.num_measured <= 100 and len(burst["adaptive"]) < 30:
        for which, took in burst.items():
            took.append(seconds_of(loops[which], 20))
    noise = holder["adaptive"].noise
    result: dict[str, Any] = {
        "noise": noise.describe(),
        "noise_relative_width": noise.relative_width,
        "noise_measured_steps": noise.num_measured,
        "steps_of_burst": holder["adaptive"].step,
        "overhead_burst": sum(burst["adaptive"]) / sum(burst["plain"]) - 1.0,
    }
    print(task.name, result, flush=True)
    seconds_of(loops["adaptive"], 60)
    result["measured_every"] = holder["adaptive"]._parts.adaptation.pace.measures_every
    for name in ("exact", "adaptive"):
        ratios, base = [], []
        for pair in range(pairs):
            order = ("plain", name) if pair % 2 == 0 else (name, "plain")
            length = (
                block if name == "exact" else whole_periods(block, holder[name]._parts.adaptation.pace.measures_every)
            )
            took = {which: seconds_of(loops[which], length) for which in order}
            ratios.append(took[name] / took["plain"] - 1.0)
            base.append(took["plain"] / length)
        median, low, high = interval(ratios, seed)
        result[f"overhead_{name}"] = {"median": median, "low": low, "high": high, "bar": BARS[name], "pairs": pairs}
        result["plain_step_ms"] = statistics.median(base) * 1e3
        print(
            task.name, name, f"{median:+.4%} [{low:+.4%}, {high:+.4%}] of {result['plain_step_ms']:.2f} ms", flush=True
        )
    result["self_check"] = self_check(loops["plain"], pairs // 2, block, seed)
    result["profile"] = {name: kernels(steps, result["measured_every"]) for name, steps in loops.items()}
    result["noise_at_end"] = holder["adaptive"].noise.describe()
    result["noise_relative_width_at_end"] = holder["adaptive"].noise.relative_width
    return result


def whole_periods(block: int, every: int) -> int:
    """At least `block` steps, and as many measured ones in each: else the median is of blocks with one or with none."""
    return math.ceil(block / every) * every


def self_check(steps: Iterator[None], pairs: int, block: int, seed: int) -> dict[str, float]:
    """Plain against itself: what the method cannot tell apart."""
    ratios = []
    for pair in range(pairs):
        first, second = seconds_of(steps, block), seconds_of(steps, block)
        ratios.append((second / first if pair % 2 == 0 else first / second) - 1.0)
    median, low, high = interval(ratios, seed)
    return {"median": median, "low": low, "high": high}


def measure(quick: bool, seed: int) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    pairs, block = (6, 10) if quick else (24, 20)
    results: dict[str, Any] = {}
    for make in (language_task, image_task):
        task = make(seed)
        results[task.name] = measure_task(task, pairs, block, seed)
        torch.cuda.empty_cache()
    worst = {
        f"overhead_{name}": max((result[f"overhead_{name}"] for result in results.values()), key=_median)
        for name in ("exact", "adaptive")
    }
    return {**worst, "tasks": results, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}


def _median(entry: dict[str, float]) -> float:
    return entry["median"] if math.isfinite(entry["median"]) else math.inf
