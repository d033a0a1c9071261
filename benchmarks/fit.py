"""How fast and how well throughput models are fitted and best batches found, against the published way.

Times are medians of process CPU time on one thread; the reference runs in the same process. The last line
printed is one JSON object, also written to `results/fit.json` beside this file.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import data_folder, finish
from scipy.optimize import minimize

from pollux.goodput import (
    BatchLimits,
    Efficiency,
    FabricThroughput,
    GoodputModel,
    Observation,
    PublishedThroughput,
    best_batch,
    fit,
    fit_fabric,
    goodput_tables,
    published_best_batch,
)
from pollux.goodput.loss import LOWER, UPPER, FitProblem
from pollux.goodput.throughput import Array, FloatArray, published_sync_basis

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
PUBLISHED_START = np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001])
NUM_OBSERVATIONS = 20
TRUTH = PublishedThroughput(0.17, 0.059, 1.39, 0.0094, 0.28, 0.0096, 1.9)


def measurements(folder: Path, application: str, file: str) -> Iterator[Observation]:
    """The rows of one published table; computing is what a step takes less its synchronisation."""
    with (folder / "profiles" / application / file).open(newline="") as lines:
        for row in csv.DictReader(lines):
            if "placement" in row:
                num_nodes, num_gpus = len(row["placement"]), sum(map(int, row["placement"]))
            else:
                num_nodes, num_gpus = int(row["num_nodes"]), int(row["num_replicas"])
            step, sync = float(row["step_time"]), float(row["sync_time"])
            yield Observation(num_nodes, num_gpus, float(row["local_bsz"]), step - sync, step)


def synthetic_measurements(generator: np.random.Generator) -> Iterator[Observation]:
    """Rows of a known model with 10 % noise, for when the published ones are not there."""
    for num_nodes, num_gpus in placements():
        for local_batch in (4.0, 8.0, 12.0):
            noise = np.exp(0.1 * generator.standard_normal(2))
            step = TRUTH.step_seconds(float(num_nodes), float(num_gpus), local_batch)
            compute = TRUTH.compute_seconds(local_batch)
            yield Observation(num_nodes, num_gpus, local_batch, compute * noise[0], step * noise[1])


def placements() -> list[tuple[int, int]]:
    """All N from 1 to 16 nodes with K from N to 4N GPUs: 424."""
    return [(nodes, gpus) for nodes in range(1, 17) for gpus in range(nodes, 4 * nodes + 1)]


def samples(
    tables: Sequence[Sequence[Observation]], count: int, generator: np.random.Generator
) -> list[list[Observation]]:
    """Random sets of 20 rows, each of one application, that leave no parameter unseen."""
    chosen: list[list[Observation]] = []
    while len(chosen) < count:
        table = tables[len(chosen) % len(tables)]
        rows = [table[index] for index in generator.choice(len(table), NUM_OBSERVATIONS, replace=False)]
        across = any(row.num_nodes > 1 and row.num_gpus > 2 for row in rows)
        within = any(row.num_nodes == 1 and row.num_gpus > 2 for row in rows)
        if across and within:
            chosen.append(rows)
    return chosen


def reference_fit(observations: Sequence[Observation]) -> float:
    """The loss that L-BFGS-B attains from the published start, with the exact gradient."""
    columns = np.array(
        [(row.num_nodes, row.num_gpus, row.local_batch, row.compute_seconds, row.step_seconds) for row in observations]
    ).T
    basis = published_sync_basis(columns[0], columns[1])
    problem = FitProblem(columns[2], basis, columns[3], columns[4], np.ones(columns.shape[1]))

    def objective(parameters: FloatArray) -> tuple[float, FloatArray]:
        loss = problem.loss(parameters)
        gradient = problem.derivatives(parameters)[0]
        gradient[:6] /= parameters[:6]
        return loss, gradient

    bounds = list(zip(LOWER, UPPER, strict=True))
    return float(minimize(objective, PUBLISHED_START, jac=True, method="L-BFGS-B", bounds=bounds).fun)


def reference_table(model: GoodputModel, num_nodes: Array, num_gpus: Array) -> FloatArray:
    """Goodputs of all placements by the published 50 totals each, in whole-array steps."""
    limits = model.limits
    smallest = np.maximum(limits.initial, limits.local_min * num_gpus)
    largest = np.maximum(smallest, limits.maximum)
    local = np.geomspace(smallest, largest, 50) / num_gpus
    accumulation = np.ceil(local / limits.local_max - 1e-8) - 1.0
    forced = (num_gpus == 1) & (local > limits.initial + 1e-8)
    accumulation = np.where(forced, np.maximum(accumulation, 1.0), accumulation)
    local = np.ceil(local / (accumulation + 1.0) - 1e-8)
    total = num_gpus * local * (accumulation + 1.0)
    seconds = model.throughput.step_seconds(num_nodes, num_gpus, local, accumulation)
    goodput = total / seconds * model.efficiency.efficiency(total)
    return np.asarray(np.where(limits.local_min * num_gpus <= limits.maximum, goodput.max(axis=0), 0.0))


def median_ms(run: Callable[[int], object], repeats: int, inner: int = 1) -> float:
    """The median of `repeats` timings in milliseconds, each over `inner` runs of `run(index)`."""
    run(0)
    timings = []
    for repeat in range(repeats):
        started = time.process_time()
        for index in range(inner):
            run(repeat * inner + index)
        timings.append((time.process_time() - started) / inner * 1e3)
    return round(statistics.median(timings), 4)


def rmsle(model: PublishedThroughput | FabricThroughput | None, rows: Sequence[Observation]) -> float:
    """Root mean square of log(predicted/measured) over step times."""
    assert model is not None
    columns = np.array([(row.num_nodes, row.num_gpus, row.local_batch, row.step_seconds) for row in rows]).T
    error = np.log(model.step_seconds(columns[0], columns[1], columns[2])) - np.log(columns[3])
    return round(float(np.sqrt(np.mean(error**2))), 4)


def accuracy(folder: Path) -> dict[str, Any]:
    """RMSLE of both models on each application: all measured placements, and those with the scalability rows."""
    report: dict[str, dict[str, float]] = {}
    for application in APPLICATIONS:
        measured = list(measurements(folder, application, "placements.csv"))
        larger = list(measurements(folder, application, "scalability.csv"))
        for suffix, rows in (("", measured), ("_with_scalability", measured + larger)):
            report.setdefault("rmsle" + suffix, {})[application] = rmsle(fit(rows).parameters, rows)
            report.setdefault("rmsle_fabric" + suffix, {})[application] = rmsle(fit_fabric(rows).parameters, rows)
        errors = f"{report['rmsle'][application]}, fabric model {report['rmsle_fabric'][application]}"
        print(f"{application}: RMSLE {errors}", flush=True)
    return {**report, "rmsle_max": max(report["rmsle"].values())}


def fit_times(chosen: Sequence[Sequence[Observation]], repeats: int) -> dict[str, float]:
    """Cold, warm and reference fits of 20 rows, and the worst loss relative to the reference."""

    def cycle(index: int) -> int:
        return index % len(chosen)

    warm = [fit(rows[: NUM_OBSERVATIONS - 1]).parameters for rows in chosen]
    times = {
        "fit_ms_median": median_ms(lambda index: fit(chosen[cycle(index)]), repeats),
        "warm_fit_ms_median": median_ms(lambda index: fit(chosen[cycle(index)], warm[cycle(index)]), repeats),
        "reference_fit_ms_median": median_ms(lambda index: reference_fit(chosen[cycle(index)]), repeats),
    }
    excess = [fit(rows).loss / reference_fit(rows) - 1.0 for rows in chosen]
    return {**times, "loss_excess_max": round(max(excess), 6)}


def batch_times(model: GoodputModel, repeats: int) -> dict[str, float]:
    """The best batch of one placement, and the table of one job on all 424."""
    pairs = placements()
    num_nodes, num_gpus = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    arguments = model.throughput, model.efficiency, model.limits
    return {
        "best_batch_ms": median_ms(lambda index: best_batch(*arguments, *pairs[index % len(pairs)]), repeats, inner=50),
        "reference_best_batch_ms": median_ms(
            lambda index: published_best_batch(*arguments, *pairs[index % len(pairs)]), repeats, inner=10
        ),
        "placements_424_ms": median_ms(lambda _: goodput_tables([model], num_nodes, num_gpus), repeats),
        "reference_placements_424_ms": median_ms(lambda _: reference_table(model, num_nodes, num_gpus), repeats),
    }


def main() -> None:
    """Run everything, print the figures, write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50 repeats instead of 300")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    repeats = 50 if arguments.quick else 300
    generator = np.random.default_rng(arguments.seed)
    folder = data_folder()
    report: dict[str, Any] = {"rmsle": None, "rmsle_max": None}
    if folder is not None:
        tables = [
            [*measurements(folder, name, "placements.csv"), *measurements(folder, name, "scalability.csv")]
            for name in APPLICATIONS
        ]
        report.update(accuracy(folder))
    else:
        print("the published measurements are absent: timing on synthetic ones, rmsle is null", flush=True)
        tables = [list(synthetic_measurements(generator))]
    chosen = samples(tables, 60, generator)
    print("timing fits of 20 observations", flush=True)
    report.update(fit_times(chosen, repeats))
    print("timing best batches", flush=True)
    model = GoodputModel(TRUTH, Efficiency(12, 1.0, 5.0), BatchLimits(12, 384, 4, 12))
    report.update(batch_times(model, repeats))
    finish("fit", report, arguments.quick)


if __name__ == "__main__":
    main()
