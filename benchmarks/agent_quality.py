"""Whether adaptation hurts the model: final quality of adaptive against exact runs, and whether efficiency is true.

Every run is the user's own loop through `pollux.init`, on one replica. The tasks are in `quality_tasks`; runs
are shared out over processes, one per core. A long measurement can be cut and go on later (`--parts`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import finish
from quality_tasks import Indices, Task, digits_task, text_task

import pollux

CEILING = 16  # times the initial batch
SEEDS = 64
FIRST_SEED = 500  # fixed beforehand; the tasks were chosen with seeds below 200
POINTS = 24  # evaluations along a run
SCALES = (2, 4, 8)
SPANS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5)
REPEATS = 6
TASKS = {"digits": digits_task, "text": text_task}
COLOURS = {"exact": "#8a8a8a", "adaptive": "#0072b2"}


@dataclass(slots=True)
class Run:
    """One training: its metrics at the end, what it took, and the way there by epochs of progress."""

    mode: str
    seed: int
    final: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    samples: int = 0
    share_at_4x: float = 0.0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    rollbacks: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    batches: list[tuple[float, int]] = field(default_factory=list)


def train(task: Task, seed: int, adaptive: bool) -> Run:
    """One run from scratch; in both modes the same model, order of samples and schedule of the seed."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.optimizer(model)
    steps = math.ceil(task.size / task.initial_batch) * task.epochs
    job = pollux.init(
        model,
        optimizer,
        Indices(task.size),
        batch_size=task.initial_batch,
        max_batch_size=CEILING * task.initial_batch if adaptive else None,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: task.schedule(step / steps)),
        seed=seed,
        collate_fn=torch.tensor,
    )
    run = Run("adaptive" if adaptive else "exact", seed)
    with job:
        _loop(task, job, model, run)
    return run


def _loop(task: Task, job: Any, model: torch.nn.Module, run: Run) -> None:
    whole, large, evaluating = task.size * task.epochs, 0, 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in job.epochs(task.epochs):
        for index in job.batches():
            before, batch = job.samples, job.batch_size
            job.backward(task.loss(job.model, index))
            if job.samples > before and batch >= 4 * task.initial_batch:
                large += job.samples - before
            if not run.batches or run.batches[-1][1] != job.batch_size:
                run.batches.append((round(job.progress / task.size, 4), job.batch_size))
            if job.progress >= len(run.curve) / POINTS * whole:
                began = time.process_time()
                run.curve.append((round(job.progress / task.size, 4), round(task.evaluate(model)[task.metric], 5)))
                evaluating += time.process_time() - began
    run.final = task.evaluate(model)
    run.steps, run.samples, run.share_at_4x = job.step, job.samples, large / job.samples
    run.cpu_seconds = time.process_time() - cpu - evaluating
    run.wall_seconds = time.perf_counter() - wall - evaluating
    run.rollbacks = sum(event.kind == "rolled-back" for event in job.receipt.events)


def difference(exact: list[float], adaptive: list[float]) -> dict[str, float]:
    """Means, deviations, and the mean difference with its 95 % interval in pooled standard deviations.

    Student's interval for two groups of equal variance; below 0 is to the advantage of adaptive runs.
    """
    from scipy.stats import t

    count = len(exact)
    pooled = math.sqrt((statistics.variance(exact) + statistics.variance(adaptive)) / 2.0)
    middle = (statistics.mean(adaptive) - statistics.mean(exact)) / pooled
    half = float(t.ppf(0.975, 2 * count - 2)) * math.sqrt(2.0 / count)
    return {
        "exact_mean": statistics.mean(exact),
        "exact_sd": statistics.stdev(exact),
        "adaptive_mean": statistics.mean(adaptive),
        "adaptive_sd": statistics.stdev(adaptive),
        "difference_in_sd": middle,
        "low": middle - half,
        "high": middle + half,
    }


def kept(parts: Path | None, name: str, compute: Callable[[], Any]) -> Any:
    """What an earlier sitting left under that name in the folder; else what is computed now, and is left there."""
    if parts is None:
        return compute()
    path = parts / f"{name}.json"
    if not path.exists():
        parts.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(compute()), encoding="utf-8")
        beside.rename(path)
    return json.loads(path.read_text(encoding="utf-8"))


def compare(task: Task, seeds: range, parts: Path | None = None) -> dict[str, Any]:
    """Exact and adaptive runs of all seeds in turn."""
    runs: dict[str, list[Run]] = {"exact": [], "adaptive": []}
    for seed in seeds:
        for mode, done in runs.items():
            compute = partial(lambda seed, mode: asdict(train(task, seed, adaptive=mode == "adaptive")), seed, mode)
            done.append(Run(**kept(parts, f"{task.name}-{seed}-{mode}", compute)))
        exact, adaptive = runs["exact"][-1], runs["adaptive"][-1]
        print(
            f"{task.name} seed {seed}: {task.metric} {exact.final[task.metric]:.4f} exact, "
            f"{adaptive.final[task.metric]:.4f} adaptive; steps {exact.steps} and {adaptive.steps}, "
            f"{adaptive.share_at_4x:.0%} of samples at 4 x the batch or more",
            flush=True,
        )
    exact_runs, adaptive_runs = runs["exact"], runs["adaptive"]
    metrics = {
        name: difference([run.final[name] for run in exact_runs], [run.final[name] for run in adaptive_runs])
        for name in exact_runs[0].final
    }
    return {
        "optimiser": task.optimiser,
        "initial_batch": task.initial_batch,
        "ceiling": CEILING * task.initial_batch,
        "epochs": task.epochs,
        "epoch_samples": task.size,
        "seeds": len(seeds),
        "metric": task.metric,
        "metrics": metrics,
        "share_at_4x": statistics.mean(run.share_at_4x for run in adaptive_runs),
        "share_at_4x_least": min(run.share_at_4x for run in adaptive_runs),
        "steps_ratio": _ratio(runs, "steps"),
        "samples_ratio": _ratio(runs, "samples"),
        "cpu_ratio": _ratio(runs, "cpu_seconds"),
        "wall_ratio": _ratio(runs, "wall_seconds"),
        "rollbacks": sum(run.rollbacks for run in adaptive_runs),
        "runs": [asdict(run) for done in runs.values() for run in done],
    }


def _ratio(runs: dict[str, list[Run]], name: str) -> float:
    means = {mode: statistics.mean(getattr(run, name) for run in done) for mode, done in runs.items()}
    return means["adaptive"] / means["exact"]


@dataclass(frozen=True, slots=True)
class Middle:
    """A state in mid-training, and the gradient noise known there."""

    model: dict[str, Any]
    optimizer: dict[str, Any]
    noise: dict[str, Any]
    noise_scale: float


def middle_of(task: Task, seed: int) -> Middle:
    """Train at the initial batch and a constant learning rate, measuring noise."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = task.optimizer(model)
    with _held(task, model, optimizer, 1, task.probe_steps * task.initial_batch, seed, None) as job:
        _advance(task, job)
        noise = job._parts.adaptation.tracker.state_dict()
        scale = job.noise.noise_scale
    return Middle(copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), noise, scale)


def _held(task: Task, model: Any, optimizer: Any, scale: int, span: int, seed: int, scheduler: Any) -> Any:
    """An adaptive job whose batch stays at `scale` times the initial one; all else is as always."""
    job = pollux.init(
        model,
        optimizer,
        Indices(task.size),
        batch_size=task.initial_batch,
        max_batch_size=CEILING * task.initial_batch,
        lr_scheduler=scheduler,
        epoch_size=span,
        seed=seed,
        collate_fn=torch.tensor,
    )
    adaptation = job._parts.adaptation
    adaptation.total = scale * task.initial_batch
    adaptation.choice = adaptation.fitted()
    adaptation.next_change = lambda progress: None  # type: ignore[method-assign]
    return job


def _advance(task: Task, job: Any) -> None:
    for _ in job.epochs(1):
        for index in job.batches():
            job.backward(task.loss(job.model, index))


def finished(task: Task, start: Middle, scale: int, span: int, seed: int) -> tuple[float, float, int]:
    """Loss, progress and samples after training from the middle to the end of a schedule of `span` of progress."""
    torch.manual_seed(seed)
    model = task.build()
    model.load_state_dict(start.model)
    optimizer = task.optimizer(model)
    optimizer.load_state_dict(copy.deepcopy(start.optimizer))
    steps = span / task.initial_batch
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1.0 - step / steps, 0.02))
    with _held(task, model, optimizer, scale, span, seed, falling) as job:
        job._parts.adaptation.tracker.load_state_dict(start.noise)
        job._parts.adaptation.believed = job.noise
        _advance(task, job)
        return task.training_loss(model), job.progress, job.samples


def efficiency(task: Task, repeats: int, seed: int) -> dict[str, Any]:
    """Predicted against measured efficiency of 2, 4 and 8 times the initial batch, from one state in mid-training.

    Both end with the same falling learning rate, so that what is compared is what was learned and not how much the
    parameters jitter. Runs at M0 of several lengths give the loss by samples; a run at S·M0 that ends by the job's
    own count of progress reaches a loss for which M0 needs n samples: measured = n over its samples, predicted =
    progress over its samples. The interval is from resampling the repeats.
    """
    start = middle_of(task, seed)
    unit = task.probe_span * task.initial_batch
    base = {
        part: np.array([finished(task, start, 1, round(part * unit), seed + 1 + turn)[0] for turn in range(repeats)])
        for part in SPANS
    }
    result: dict[str, Any] = {"noise_scale": start.noise_scale, "repeats": repeats, "scales": {}}
    result["loss_by_span"] = {str(part): float(losses.mean()) for part, losses in base.items()}
    generator = np.random.default_rng(seed)
    for scale in SCALES:
        rows = np.array([finished(task, start, scale, unit, seed + 1000 * scale + turn) for turn in range(repeats)])
        predicted = float(rows[:, 1].sum() / rows[:, 2].sum())
        measured = _samples_for(base, rows[:, 0]) * unit / float(rows[:, 2].mean())
        draws = [
            _samples_for({part: _resampled(generator, losses) for part, losses in base.items()}, again)
            for again in (_resampled(generator, rows[:, 0]) for _ in range(400))
        ]
        low, high = np.quantile(draws, (0.025, 0.975)) * unit / float(rows[:, 2].mean())
        result["scales"][str(scale)] = {
            "predicted": predicted,
            "measured": measured,
            "low": float(low),
            "high": float(high),
            "error": predicted / measured - 1.0,
        }
        print(f"{task.name} efficiency at {scale} x: predicted {predicted:.3f}, measured {measured:.3f}", flush=True)
    result["worst_error"] = max(abs(entry["error"]) for entry in result["scales"].values())
    return result


def _resampled(generator: np.random.Generator, values: Any) -> Any:
    return values[generator.integers(0, len(values), len(values))]


def _samples_for(base: dict[float, Any], losses: Any) -> float:
    """The length of a run at M0, in units of the span, that ends with that mean loss: a parabola in log length."""
    reached = [float(values.mean()) for values in base.values()]
    return float(np.exp(np.polyval(np.polyfit(reached, np.log(list(base)), 2), float(losses.mean()))))


def _one(name: str, quick: bool, seed: int, parts: Path, what: str) -> None:
    """One piece of the measurement, left in the folder: the efficiency of a task, or a run in a mode."""
    torch.set_num_threads(1)
    task = TASKS[name](quick)
    if what == "efficiency":
        kept(parts, f"{name}-efficiency", lambda: efficiency(task, 2 if quick else REPEATS, seed))
    else:
        kept(parts, f"{name}-{seed}-{what}", lambda: asdict(train(task, seed, adaptive=what == "adaptive")))


def measure_task(name: str, quick: bool, seed: int, parts: Path) -> dict[str, Any]:
    """One task from its pieces: efficiency, and quality over seeds."""
    task, first = TASKS[name](quick), seed + FIRST_SEED
    probe = kept(parts, f"{name}-efficiency", lambda: efficiency(task, 2 if quick else REPEATS, first))
    return {**compare(task, range(first, first + (2 if quick else SEEDS)), parts), "efficiency": probe}


def measure(quick: bool, seed: int, parts: Path | None = None, workers: int | None = None) -> dict[str, Any]:
    """Both tasks, piece by piece in several processes; in a full run also the worst figures of both, to be judged."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder) if parts is None else parts
        first = seed + FIRST_SEED
        pieces = [(name, first, "efficiency") for name in TASKS]
        seeds = range(first, first + (2 if quick else SEEDS))
        pieces += [(name, each, mode) for each in seeds for name in TASKS for mode in ("exact", "adaptive")]
        # Not forked: a child of a process with threads of PyTorch's may hang.
        with ProcessPoolExecutor(workers or os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            running = [pool.submit(_one, name, quick, each, parts, what) for name, each, what in pieces]
            for done, piece in enumerate(running, start=1):
                piece.result()
                if done % 16 == 0:
                    print(f"{done} of {len(running)} pieces done", flush=True)
        tasks = {name: measure_task(name, quick, seed, parts) for name in TASKS}
    if quick:
        return {"quality": tasks}
    judged = [result["metrics"][result["metric"]] for result in tasks.values()]
    return {
        "quality": tasks,
        "quality_difference_worst_sd": max(max(abs(entry["low"]), abs(entry["high"])) for entry in judged),
        "quality_share_at_4x": min(result["share_at_4x"] for result in tasks.values()),
        "quality_steps_ratio": max(result["steps_ratio"] for result in tasks.values()),
        "efficiency_worst_error": max(result["efficiency"]["worst_error"] for result in tasks.values()),
    }


def tables(result: dict[str, Any]) -> str:
    """The tables of the page on accuracy, in Markdown."""
    lines = ["| task | held-out | exact | adaptive | difference, sd (95 %) |", "|---|---|---|---|---|"]
    for name, task in result["quality"].items():
        for metric, entry in task["metrics"].items():
            exact, adaptive = (
                f"{entry[f'{mode}_mean']:.4f} ± {entry[f'{mode}_sd']:.4f}" for mode in ("exact", "adaptive")
            )
            interval = f"{entry['difference_in_sd']:+.2f} ({entry['low']:+.2f} to {entry['high']:+.2f})"
            lines.append(f"| {name} | {metric.replace('_', ' ')} | {exact} | {adaptive} | {interval} |")
    lines += [
        "",
        "| task | steps | samples | CPU time | samples at 4 × or more | runs that stayed below |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in result["quality"].items():
        small = sum(run["mode"] == "adaptive" and run["share_at_4x"] == 0.0 for run in task["runs"])
        ratios = " | ".join(f"{task[f'{what}_ratio']:.2f}" for what in ("steps", "samples", "cpu"))
        lines.append(f"| {name} | {ratios} | {task['share_at_4x']:.0%} | {small} of {task['seeds']} |")
    lines += ["", "| task | batch | predicted | measured (95 %) | error |", "|---|---|---|---|---|"]
    for name, task in result["quality"].items():
        for scale, entry in task["efficiency"]["scales"].items():
            measured = f"{entry['measured']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})"
            lines.append(f"| {name} | {scale} × | {entry['predicted']:.2f} | {measured} | {entry['error']:+.0%} |")
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Of every run the quality and the batch over progress, and the quality at the end; one row for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), layout="constrained", width_ratios=(1.2, 1.2, 0.7))
    for (curves, batches, ends), (name, task) in zip(axes, result["quality"].items(), strict=True):
        for run in task["runs"]:
            label = run["mode"] if run["seed"] == task["runs"][0]["seed"] else None
            style = {"color": COLOURS[run["mode"]], "linewidth": 0.8, "alpha": 0.5, "label": label}
            curves.plot(*zip(*run["curve"][1:], strict=True), **style)
            batches.step(
                *zip(*run["batches"], (task["epochs"], run["batches"][-1][1]), strict=True), where="post", **style
            )
        metric = f"held-out {task['metric'].replace('_', ' ')}"
        curves.set(title=f"{name}, {task['optimiser']}", xlabel="progress (epochs)", ylabel=metric, yscale="log")
        batches.set(title="total batch", xlabel="progress (epochs)", ylabel="samples per step")
        batches.set_yscale("log", base=2)
        batches.axhline(4 * task["initial_batch"], color="#999999", linewidth=0.8, linestyle=":")
        batches.annotate(
            "4 × initial", (task["epochs"], 4 * task["initial_batch"]), fontsize=8, ha="right", va="bottom"
        )
        batches.set_ylim(task["initial_batch"] / 1.2, task["ceiling"] * 1.2)
        for axis in (curves.yaxis, batches.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(ScalarFormatter() if axis is curves.yaxis else "")
        curves.legend(frameon=False, fontsize=8)
        _draw_ends(ends, task)
        for axis in (curves, batches, ends):
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_ends(axis: Any, task: dict[str, Any]) -> None:
    for place, (mode, colour) in enumerate(COLOURS.items()):
        values = [run["final"][task["metric"]] for run in task["runs"] if run["mode"] == mode]
        spread = np.linspace(-0.18, 0.18, len(values))
        axis.plot(place + spread, values, ".", color=colour, alpha=0.6)
        axis.errorbar(place, statistics.mean(values), statistics.stdev(values), fmt="_", color="black", capsize=4)
    axis.set(title="at the end", xlim=(-0.5, 1.5), xticks=(0, 1), xticklabels=list(COLOURS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, help="processes; by default one per core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parts", type=Path, help="leave what is finished in this folder, go on from what is there, keep the result"
    )
    parser.add_argument(
        "--picture", type=Path, help="draw the runs of this file of results and print its tables, measuring nothing"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/images/accuracy.png"))
    arguments = parser.parse_args()
    if arguments.picture is not None:
        shown = json.loads(arguments.picture.read_text(encoding="utf-8"))
        draw(shown, arguments.output)
        print(tables(shown))
    else:
        measured = {
            **measure(arguments.quick, arguments.seed, arguments.parts, arguments.workers),
            "seed": arguments.seed,
        }
        finish("agent_quality", measured, arguments.quick or arguments.parts is None)
