"""`pollux simulate`: simulates workloads under policies, and compares the results."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.arguments.options import Json, complete_policies, real, whole
from pollux.cli.arguments.options import trigger as read_trigger
from pollux.cli.printing.visible import say
from pollux.core import InvalidInput

if TYPE_CHECKING:
    from pollux.sim import Application, IsolatedTimes, PolicyChoice, SimulationSettings, Workload

__all__ = ["Outputs", "simulate", "simulate_together", "use_one_thread"]


def _read_resize_seconds(value: str) -> float | str:
    return value if value == "auto" else real(lambda number: number >= 0, "0 or more, or 'auto'")(value)


def simulate(
    workloads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="WORKLOAD", help="CSV files, or a history; the built-in workload if none is given."),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            autocompletion=complete_policies,
            help="Comma-separated names; results are compared to the first. See 'pollux policies'.",
        ),
    ] = "castor,pollux,tiresias,optimus-oracle",
    profiles: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measured applications; else the built-in ones.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="Nodes of the cluster; by default 16, or the history's."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="GPUs of each node; by default 4, or the history's."),
    ] = None,
    trigger: Annotated[
        Any,
        typer.Option(
            metavar="rounds|events",
            parser=read_trigger,
            help="Decide in fixed rounds, or when something changes.",
        ),
    ] = "rounds",
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", parser=real(lambda value: value > 0, "above 0"), help="Length of a round."),
    ] = 60.0,
    resize_seconds: Annotated[
        Any,
        typer.Option(
            metavar="SECONDS|auto",
            parser=_read_resize_seconds,
            help="How long a job pauses when its GPUs change; auto: by its state's size.",
        ),
    ] = 30.0,
    max_gpus_per_job: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="Most GPUs for an adaptive job.")
    ] = 64,
    fairness: Annotated[
        float, typer.Option(metavar="P", parser=real(), help="The exponent p of the policy pollux; lower is fairer.")
    ] = -1.0,
    interference: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            parser=real(lambda value: 0 <= value < 1, "from 0 to below 1"),
            help="Speed that distributed jobs lose when they share a node.",
        ),
    ] = 0.0,
    avoid_interference: Annotated[
        bool, typer.Option(help="Whether the policy pollux keeps distributed jobs off each other's nodes.")
    ] = True,
    seed: Annotated[int, typer.Option(metavar="N", parser=whole(0), help="Same seed and input, same results.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", parser=whole(1), help="Processes; by default one per run, up to the number of CPUs."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE.json", help="Folder for plots, results.json and report.html; or only the results."
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Job to plot; by default the adaptive one with most GPU time."),
    ] = None,
    bound: Annotated[
        bool, typer.Option(help="Work out what no schedule can beat; takes seconds on large clusters.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Simulate workloads under scheduling policies and compare completion times, fairness and cost.

    Example: pollux simulate jobs.csv --profiles profiles --policies pollux,tiresias --output results
    """
    use_one_thread()
    from pollux.sim import SimulationSettings, check_runs, choose_policies, to_json

    world = _load_world(_without_dash(workloads or [], as_json), profiles, nodes, gpus_per_node)
    settings = SimulationSettings(
        num_nodes=nodes or world.num_nodes,
        gpus_per_node=gpus_per_node or world.gpus_per_node,
        trigger=trigger,
        interval_seconds=interval,
        resize_seconds=resize_seconds,
        interference=interference,
        max_gpus_per_job=max_gpus_per_job,
        seed=seed,
    )
    chosen = choose_policies(
        [name.strip() for name in policies.split(",") if name.strip()],
        {"fairness": fairness, "avoid_interference": avoid_interference},
    )
    check_runs(world.workloads, chosen, world.applications, settings)
    file = output if output is not None and output.suffix == ".json" else None
    folder = output if file is None else None
    _check_job(job, world.workloads, folder)
    outputs = Outputs(folder, job, file, bound)
    complete = simulate_together(world.workloads, chosen, world.applications, settings, world.source, workers, outputs)
    if as_json:
        say(to_json(complete), nl=False)
    else:
        _print(complete, folder)


def _without_dash(paths: Sequence[Path], as_json: bool) -> list[Path]:
    """The workloads without the `-` of `--json -`; InvalidInput for `--json FILE`."""
    if not as_json:
        return list(paths)
    for path in paths:
        if path.suffix == ".json" and not path.exists():
            raise InvalidInput(f"--json prints the results; to write them to '{path}', give --output {path}")
    return [path for path in paths if str(path) != "-"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write: a report in a folder, with a plot of one job if it is named; a JSON file.

    None: do not write that file.

    With `bound`, the average completion time that no schedule can beat stands beside the results.
    """

    folder: Path | None = None
    job: str | None = None
    json_file: Path | None = None
    bound: bool = False


def simulate_together(
    workloads: Sequence[Workload],
    policies: Sequence[PolicyChoice],
    applications: Mapping[str, Application],
    settings: SimulationSettings,
    source: str,
    workers: int | None = None,
    outputs: Outputs | None = None,
) -> dict[str, Any]:
    """Simulate with a progress bar, write all outputs or none, and return the whole document."""
    from pollux.cli.arguments.output import staged_file, staged_folder
    from pollux.cli.display.render import progress_bar
    from pollux.sim import bounds, compare, configuration, document, measure, to_json

    outputs = outputs or Outputs()
    config = configuration(workloads, policies, applications, settings, source)
    times = _checked_times(workloads, applications, settings)
    with ExitStack() as files:
        folder = stream = None
        if outputs.folder is not None:
            from pollux.sim.results.plots import require_matplotlib

            require_matplotlib()
            folder = files.enter_context(staged_folder("--output", outputs.folder))
        if outputs.json_file is not None:
            stream = files.enter_context(staged_file("--output", outputs.json_file))
        with progress_bar("simulating") as progress:
            outcomes = compare(workloads, policies, applications, settings, workers or _cpus(), progress)
        results = [measure(outcome, applications, settings, times) for outcome in outcomes]
        least = bounds(workloads, applications, settings) if outputs.bound else None
        complete = document(config, results, least)
        if folder is not None:
            from pollux.sim.results.report import write_report

            write_report(folder, complete, outcomes, applications, outputs.job)
        if stream is not None:
            stream.write(to_json(complete))
    return complete


def _checked_times(
    workloads: Sequence[Workload], applications: Mapping[str, Application], settings: SimulationSettings
) -> IsolatedTimes:
    """Times of jobs on an empty cluster; refuses settings whose results could not be compared, before they are run."""
    from pollux.sim import IsolatedTimes

    times = IsolatedTimes(applications, settings.num_nodes, settings.gpus_per_node)
    for name in sorted({request.application for workload in workloads for request in workload.jobs}):
        times.seconds(name, 1.0)
    return times


def _print(document: Mapping[str, Any], output: Path | None) -> None:
    from pollux.cli.display.render import classes_table, print_table, results_table, standard_output
    from pollux.sim import describe_world

    console = standard_output()
    for line in describe_world(document["config"]):
        console.print(line, style="dim", markup=False)
    print_table(console, results_table(document["results"], console.width, bounds=document.get("bounds_hours")))
    if any(len(result["classes"]) > 1 for result in document["results"]):
        print_table(console, classes_table(document["results"]))
    if output is not None:
        console.print(f"report: {output / 'report.html'}", markup=False, soft_wrap=True)


def use_one_thread() -> None:
    """Use one thread per process for linear algebra; works only before numpy is imported.

    The matrices are small, so that more threads would only wait for each other and slow down the other runs.
    """
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_job(job: str | None, workloads: Sequence[Workload], output: Path | None) -> None:
    if job is None:
        return
    if output is None:
        raise InvalidInput(f"--job is '{job}' but nothing is plotted; add --output DIR")
    names = [request.name for workload in workloads for request in workload.jobs]
    if job not in names:
        close = difflib.get_close_matches(job, names, n=1, cutoff=0.4)
        hint = f"did you mean '{close[0]}'?" if close else "give one from the column 'name'"
        raise InvalidInput(f"--job is '{job}', which is in none of the workloads; {hint}")


@dataclass(frozen=True, slots=True)
class _World:
    """Workloads, their applications, and the cluster that they run on by default."""

    workloads: Sequence[Workload]
    applications: Mapping[str, Application]
    source: str
    num_nodes: int = 16
    gpus_per_node: int = 4


def _load_world(
    paths: Sequence[Path], profiles: Path | None, nodes: int | None = None, gpus_per_node: int | None = None
) -> _World:
    histories = [path for path in paths if _is_history(path)]
    if histories:
        return _load_history(paths, profiles, histories[0], nodes, gpus_per_node)
    if profiles is None:
        from pollux.sim.workloads.builtin import builtin_applications

        world = _World(_load_workloads(paths), builtin_applications(), "built-in")
        _check_built_in(world.workloads, world.applications)
        return world
    from pollux.sim import load_profiles

    applications = load_profiles(profiles)
    return _World(_load_workloads(paths), applications, str(profiles))


def _is_history(path: Path) -> bool:
    """Whether a file is a history, by its ending or its first line."""
    if path.suffix in (".ndjson", ".jsonl"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(512).lstrip().startswith(b"{") and path.is_file()
    except OSError:
        return False


def _load_history(
    paths: Sequence[Path], profiles: Path | None, path: Path, nodes: int | None, gpus_per_node: int | None
) -> _World:
    from pollux.sim.workloads.history import read_history

    if len(paths) > 1 or profiles is not None:
        raise InvalidInput(f"{path} is a history, which brings its own applications; give it alone, without --profiles")
    past = read_history(path)
    workload, left_out = past.on(nodes or past.num_nodes, gpus_per_node or past.gpus_per_node)
    for reason in (*past.skipped, *left_out):
        say(f"left out: {reason}", err=True)
    if not workload.jobs:
        raise InvalidInput(f"{path}: holds no job that can be replayed; export the history of jobs that ran")
    return _World([workload], past.applications, str(path), past.num_nodes, past.gpus_per_node)


def _load_workloads(paths: Sequence[Path]) -> list[Workload]:
    if not paths:
        from pollux.sim.workloads.builtin import builtin_workload

        return [builtin_workload()]
    from pollux.sim import read_workload

    stems: dict[str, Path] = {}
    for path in paths:
        if path.stem in stems:
            raise InvalidInput(
                f"{path}: named '{path.stem}' like {stems[path.stem]}, and results go by name; rename one"
            )
        stems[path.stem] = path
    return [read_workload(path) for path in paths]


def _check_built_in(workloads: Sequence[Workload], applications: Mapping[str, Application]) -> None:
    """InvalidInput, with a hint at --profiles, for an application that is not built in."""
    for workload in workloads:
        for request in workload.jobs:
            if request.application not in applications:
                raise InvalidInput(
                    f"{request.source}, field 'application': '{request.application}': not built in "
                    f"({', '.join(sorted(applications))}); give --profiles DIR with a folder for it"
                )
