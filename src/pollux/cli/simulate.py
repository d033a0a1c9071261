"""`pollux simulate`: workloads under policies, compared."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.core import InvalidInput

if TYPE_CHECKING:
    from pollux.sim import Application, Workload

__all__ = ["Trigger", "simulate"]


class Trigger(StrEnum):
    """When the scheduler decides."""

    ROUNDS = "rounds"
    EVENTS = "events"


def simulate(
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[WORKLOAD]...", help="CSV files; without any, the built-in workload.", show_default=False),
    ] = None,
    policies: Annotated[
        str, typer.Option(help="Names, comma-separated; 'pollux policies' lists them. The first is the one others are compared with.")
    ] = "pollux,tiresias,optimus-oracle",
    profiles: Annotated[Path | None, typer.Option(help="Folder of measured applications; else the built-in ones.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 16,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each node.")] = 4,
    trigger: Annotated[Trigger, typer.Option(help="Decide in fixed rounds, or when something changes.")] = Trigger.ROUNDS,
    interval: Annotated[float, typer.Option(help="Seconds of a round.")] = 60.0,
    resize_seconds: Annotated[float, typer.Option(help="How long a job stands still when its GPUs change.")] = 30.0,
    max_gpus_per_job: Annotated[int, typer.Option(help="Most GPUs an adaptive job may have.")] = 64,
    fairness: Annotated[float, typer.Option(help="Exponent p of Pollux' power mean: lower is fairer.")] = -1.0,
    interference: Annotated[
        float, typer.Option(help="Share of speed a distributed job loses to another on one of its nodes, 0 to below 1.")
    ] = 0.0,
    avoid_interference: Annotated[bool, typer.Option(help="Whether Pollux keeps distributed jobs off each other's nodes.")] = True,
    seed: Annotated[int, typer.Option(help="Same seed and input, same results.")] = 1,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one per run, up to the CPUs there are.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write plots (PNG), results.json and report.html there.")] = None,
    job: Annotated[str | None, typer.Option(help="Job to plot over time; by default the adaptive one with most GPU time.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON; '-' is standard output, and then no table.")
    ] = None,
) -> None:
    """Simulate workloads under scheduling policies, and compare job completion times, fairness and cost.

    Example: pollux simulate workload.csv --profiles profiles --policies pollux,tiresias --output results
    """
    from pollux.cli.output import staged_file, staged_folder
    from pollux.cli.render import progress_bar, results_table, standard_output, world_lines
    from pollux.sim import IsolatedTimes, SimulationSettings, choose_policies, compare, configuration, document, measure

    _check_options(nodes=nodes, gpus_per_node=gpus_per_node, interval=interval, resize_seconds=resize_seconds, max_gpus_per_job=max_gpus_per_job, fairness=fairness, interference=interference, seed=seed, workers=workers)
    settings = SimulationSettings(nodes, gpus_per_node, trigger.value, interval, resize_seconds, interference, max_gpus_per_job, seed=seed)
    chosen = choose_policies([name.strip() for name in policies.split(",") if name.strip()], {"fairness": fairness, "avoid_interference": avoid_interference})
    applications, loaded = _load(workloads or [], profiles, settings.num_gpus)
    config = configuration(loaded, chosen, applications, settings, "built-in" if profiles is None else str(profiles))
    with ExitStack() as files:
        folder = None if output is None else files.enter_context(staged_folder("--output", output))
        json_stream = None if json_file in (None, "-") else files.enter_context(staged_file("--json", Path(str(json_file))))
        with progress_bar("simulating") as progress:
            outcomes = compare(loaded, chosen, applications, settings, workers or _cpus(), progress)
        times = IsolatedTimes(applications, nodes, gpus_per_node)
        results = [measure(outcome, applications, settings, times) for outcome in outcomes]
        text = json.dumps(document(config, results), indent=1, allow_nan=False) + "\n"
        if json_stream is not None:
            json_stream.write(text)
    if json_file == "-":
        typer.echo(text, nl=False)
        return
    console = standard_output()
    for line in world_lines(config):
        console.print(line)
    console.print(results_table(results))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_options(**options: float | None) -> None:
    """Refuse values that no simulation can use, under the names the user knows."""
    remedies = {
        "nodes": (lambda value: value >= 1, "give at least 1"),
        "gpus_per_node": (lambda value: value >= 1, "give at least 1"),
        "interval": (lambda value: value > 0, "give a finite number of seconds above 0"),
        "resize_seconds": (lambda value: value >= 0, "give a finite number of seconds, 0 or more"),
        "max_gpus_per_job": (lambda value: value >= 1, "give at least 1"),
        "fairness": (lambda value: True, "give a finite number, such as -1"),
        "interference": (lambda value: 0 <= value < 1, "give a share of speed from 0 to below 1"),
        "seed": (lambda value: value >= 0, "give 0 or more"),
        "workers": (lambda value: value >= 1, "give at least 1"),
    }
    for name, value in options.items():
        allowed, remedy = remedies[name]
        if value is not None and not (math.isfinite(value) and allowed(value)):
            raise InvalidInput(f"--{name.replace('_', '-')} is {value:g}; {remedy}")


def _load(paths: Sequence[Path], profiles: Path | None, num_gpus: int) -> tuple[Mapping[str, Application], list[Workload]]:
    """Applications and workloads, checked against each other and the cluster."""
    from pollux.sim import check_applications, read_workload

    stems: dict[str, Path] = {}
    for path in paths:
        if path.stem in stems:
            raise InvalidInput(
                f"{path}: has the same name '{path.stem}' as {stems[path.stem]}, and results go by that name; rename one"
            )
        stems[path.stem] = path
    applications: Mapping[str, Application]
    if profiles is not None:
        from pollux.sim.profiles import load_profiles

        applications = load_profiles(profiles)
    else:
        from pollux.sim.builtin import builtin_applications

        applications = builtin_applications()
    if paths:
        loaded = [read_workload(path) for path in paths]
    else:
        from pollux.sim.builtin import builtin_workload

        loaded = [builtin_workload()]
    for workload in loaded:
        check_applications(workload, applications, num_gpus)
    return applications, loaded
