"""How often the noise scale's 95 % interval holds the truth, where that is known, and how wide it is.

Linear regression with Gaussian inputs: the mean and the covariance of one sample's gradient are known in closed
form at every parameter. Everything runs through the real meter and tracker, in float64 and in one process: replicas
are stood in for by micro-steps with the weights of replicas (loss × samples·K/total, gradient mean over K
afterwards), which is the arithmetic that data-parallel training does across processes.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pollux.agent.adaptation.noise_scale import NoiseEstimate, NoiseTracker
from pollux.agent.step.gradient_norms import GradientNormMeter

DIMENSIONS = 50
BATCH = 64
MEASURED = 100
WARM_UP = 25
FAR_RATIO = 30.0
PARTS = {"replicas": (4, 4), "accumulation": (3, 1), "halves": (2, 1)}  # parts of a step, replicas among them


@dataclass(frozen=True, slots=True)
class Case:
    way: str
    optimizer: str
    is_moving: bool
    is_far: bool = False

    @property
    def name(self) -> str:
        far = "/far" if self.is_far else ""
        return f"{'moving' if self.is_moving else 'still'}/{self.way}/{self.optimizer}{far}"


def cases() -> list[Case]:
    """Every way, optimiser and motion, with a noise scale near the batch and with one of 30 times the batch."""
    near = [Case(*each) for each in itertools.product(PARTS, ("sgd", "adam"), (False, True))]
    return near + [replace(case, is_far=True) for case in near]


class Regression:
    """y = x·w* + ε with x and ε standard normal; `error` is w − w*, the only parameter.

    One sample's gradient x(x·e − ε) has the mean e and the covariance (|e|² + 1)·I + e·eᵀ.
    """

    def __init__(self, ratio: float, generator: np.random.Generator) -> None:
        self.generator = generator
        # tr = (|e|² + 1)·D + |e|² is ratio·BATCH·|e|² at this length; equal sizes keep Adam's ratio near it.
        size = 1.0 / math.sqrt(ratio * BATCH - DIMENSIONS - 1)
        start = generator.choice([-size, size], size=DIMENSIONS)
        self.error = torch.nn.Parameter(torch.from_numpy(start))

    def draw(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.from_numpy(self.generator.normal(size=(samples, DIMENSIONS))),
            torch.from_numpy(self.generator.normal(size=samples)),
        )

    def loss(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return 0.5 * (x @ self.error - noise).square().mean()

    def truth(self, denominators: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
        """The squared gradient, and the variance at M0 = BATCH, under that preconditioner."""
        error = self.error.detach().numpy()
        sqr = float(np.sum((error / denominators) ** 2))
        trace = float((error @ error + 1.0) * np.sum(denominators**-2.0)) + sqr
        return sqr, trace / BATCH


def optimizer_of(case: Case, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam([parameter], lr=0.0005 if case.is_moving else 0.0)
    return torch.optim.SGD([parameter], lr=0.002 if case.is_moving else 0.0)


def denominators_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> Any:
    state = optimizer.state.get(parameter) or {}
    if "exp_avg_sq" not in state:
        return np.ones(DIMENSIONS)
    corrected = state["exp_avg_sq"].numpy() / (1.0 - 0.999 ** float(state["step"]))
    return np.sqrt(corrected) + 1e-8


def backward(problem: Regression, meter: GradientNormMeter, way: str, is_measured: bool) -> None:
    """One step's gradient as a job makes it: parts that differ by one sample, each with its weight."""
    count, replicas = PARTS[way]
    x, noise = problem.draw(BATCH + 1)
    for inputs, noises in zip(x.tensor_split(count), noise.tensor_split(count), strict=True):
        samples = len(inputs)
        if is_measured:
            meter.start_measuring((BATCH + 1) / (samples * replicas**2))
        (problem.loss(inputs, noises) * (samples * replicas / (BATCH + 1))).backward()
        if is_measured:
            meter.stop_measuring()
    if is_measured:
        meter.close_row(count, BATCH + 1, whole_factor=replicas**-2.0)
    if replicas > 1 and problem.error.grad is not None:
        problem.error.grad.div_(replicas)


def train(case: Case, seed: int) -> tuple[NoiseEstimate, float]:
    """The estimate after the measured steps, and the true noise scale averaged with the tracker's weights."""
    problem = Regression(FAR_RATIO if case.is_far else 1.0, np.random.default_rng(seed))
    optimizer = optimizer_of(case, problem.error)
    meter, tracker = GradientNormMeter(optimizer, "cpu"), NoiseTracker(BATCH, 1)
    truths = []
    warm_up = WARM_UP if case.optimizer == "adam" else 0
    for step in range(warm_up + MEASURED):
        optimizer.zero_grad()
        is_measured = step >= warm_up
        if is_measured:
            truths.append(problem.truth(denominators_of(optimizer, problem.error)))
        backward(problem, meter, case.way, is_measured)
        optimizer.step()
    tracker.add(*meter.drain())
    factor = ((tracker.memory - 1.0) / (tracker.memory + 1.0)) ** ((BATCH + 1) / BATCH)
    weights = factor ** np.arange(MEASURED)[::-1]
    sqr, var = weights @ np.array(truths)
    return tracker.estimate(), float(BATCH * var / sqr)


def measure(quick: bool, seed: int) -> dict[str, Any]:
    """Coverage and median relative width (None where infinite) by case, out of `noise_seeds` seeds each.

    `noise_far_wrong` counts bounded intervals without the truth where the noise scale is 30 times the batch.
    """
    torch.set_num_threads(1)
    seeds = 6 if quick else 100
    coverage: dict[str, int] = {}
    width: dict[str, float | None] = {}
    wrong, began = 0, time.perf_counter()
    for number, case in enumerate(cases()):
        results = [train(case, seed + 1000 * number + run) for run in range(seeds)]
        holds = [estimate.low <= truth <= estimate.high for estimate, truth in results]
        coverage[case.name] = sum(holds)
        median = statistics.median(estimate.relative_width for estimate, _ in results)
        width[case.name] = round(median, 4) if math.isfinite(median) else None
        if case.is_far:
            wrong += sum(
                math.isfinite(estimate.high) and not held for (estimate, _), held in zip(results, holds, strict=True)
            )
    print(f"{len(coverage)} cases of {seeds} seeds in {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "noise_coverage": coverage,
        "noise_relative_width": width,
        "noise_far_wrong": wrong,
        "noise_seeds": seeds,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.quick, arguments.seed)))
