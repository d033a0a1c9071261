"""The time of a job alone, at one batch on packed GPUs, which tuning and fairness use."""

from __future__ import annotations

import contextlib

from pollux.core import InvalidInput
from pollux.goodput import Efficiency, split_total
from pollux.sim.applications.application import Application

__all__ = ["packed_counts", "recorded_runs", "run_seconds"]


def packed_counts(num_gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """GPUs per node on as few nodes as possible: full nodes, then the rest."""
    for name, value in (("num_gpus", num_gpus), ("gpus_per_node", gpus_per_node)):
        if value < 1:
            raise InvalidInput(f"{name} is {value}; give at least 1")
    full, rest = divmod(num_gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


def run_seconds(application: Application, total_batch: int, num_gpus: int, gpus_per_node: int) -> float:
    """Seconds of a whole training at a fixed total batch on packed GPUs, without queueing or restarts.

    Σ over epochs of progress · (T_step + s·(T_step − T_sync)) / gain(M/M0), with true step times and the true
    gradient noise of each epoch. Refused where the application cannot run so or was not measured so.
    Nothing is cached: callers that ask often keep the answers.
    """
    counts = packed_counts(num_gpus, gpus_per_node)
    limits = application.limits
    where = f"application '{application.name}': total_batch {total_batch} on {num_gpus} GPUs"
    if not limits.initial <= total_batch <= limits.maximum:
        raise InvalidInput(f"{where}: outside {limits.initial} to {limits.maximum}; choose one of these")
    if num_gpus * limits.local_min > total_batch:
        raise InvalidInput(
            f"{where}: each GPU needs at least {limits.local_min} samples; use at most "
            f"{total_batch // limits.local_min} GPUs, or a larger batch"
        )
    batch = split_total(total_batch, num_gpus, limits)
    step, sync = application.step_and_sync_seconds(counts, batch.local_batch)
    step_seconds = step + batch.accumulation * (step - sync)
    scale = batch.total / limits.initial
    num_steps, done = 0.0, 0.0
    for epoch, until in enumerate(application.progress):
        noise = Efficiency(limits.initial, *application.gradient_statistics(batch.total, epoch))
        num_steps += (until - done) / noise.gain(scale)
        done = until
    return num_steps * step_seconds


def recorded_runs(application: Application, num_gpus: int, gpus_per_node: int) -> dict[int, float]:
    """`run_seconds` by total batch, for the recorded batches that run on that many GPUs; may be empty."""
    packed_counts(num_gpus, gpus_per_node)
    runs: dict[int, float] = {}
    for total_batch in application.batch_sizes:
        with contextlib.suppress(InvalidInput):
            runs[total_batch] = run_seconds(application, total_batch, num_gpus, gpus_per_node)
    return runs
