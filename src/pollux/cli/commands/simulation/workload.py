"""`pollux workload`: generates workloads."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.arguments.options import real, whole
from pollux.cli.printing.visible import say

__all__ = ["app", "generate"]

_POSITIVE = real(lambda value: value > 0, "above 0")

app = typer.Typer(
    help="Make workloads: who submits which job when.",
    epilog="Example: pollux workload generate --load 2.0 --output busy.csv",
    invoke_without_command=True,
)


@app.callback()
def _workload(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def generate(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Trace to sample arrivals and sizes from; else a built-in distribution."),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measured applications; else the built-in ones.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", parser=whole(1), help="Jobs to submit at load 1.")] = 160,
    hours: Annotated[
        float, typer.Option(metavar="HOURS", parser=_POSITIVE, help="Time in which the jobs are submitted.")
    ] = 8.0,
    load: Annotated[
        float, typer.Option(metavar="FACTOR", parser=_POSITIVE, help="Multiplies the number of jobs.")
    ] = 1.0,
    realistic: Annotated[
        bool, typer.Option("--realistic", help="GPUs and batches as users choose them, instead of well tuned ones.")
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", parser=whole(0), help="Same seed, same workload.")] = 1,
    nodes: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="Nodes of the cluster that the workload is for.")
    ] = 16,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", parser=whole(1), help="GPUs of each node.")] = 4,
    output: Annotated[str, typer.Option(metavar="FILE", help="Where to write; '-' is standard output.")] = "-",
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of CSV.")] = False,
) -> None:
    """Generate a workload: jobs with submission times, and the GPUs and batch their users would have chosen.

    Example: pollux workload generate --load 2.0 --seed 7 --output busy.csv
    """
    from pollux.cli.arguments.output import staged_file
    from pollux.sim.workloads.generate import GenerateSettings, generate_workload
    from pollux.sim.workloads.workload import write_workload

    settings = GenerateSettings(
        num_jobs=jobs,
        hours=hours,
        load=load,
        realistic=realistic,
        seed=seed,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
    )
    if profiles is None:
        from pollux.sim.workloads.builtin import builtin_applications

        applications = dict(builtin_applications())
    else:
        from pollux.sim.applications.profiles import load_profiles

        applications = dict(load_profiles(profiles))
    with nullcontext(None) if output == "-" else staged_file("--output", Path(output)) as file:
        name = "workload" if output == "-" else Path(output).stem
        workload = generate_workload(applications, settings, trace, name)
        if as_json:
            # As in CSV files: where a job comes from, its group and its deadline are not written.
            kept = ("name", "time", "application", "num_gpus", "batch_size")
            entries = [{key: getattr(job, key) for key in kept} for job in workload.jobs]
            content = json.dumps({"name": name, "config": asdict(settings), "jobs": entries}, indent=2) + "\n"
        else:
            content = write_workload(workload.jobs)
        if file is None:
            say(content, nl=False)
        else:
            file.write(content)
