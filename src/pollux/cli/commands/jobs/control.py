"""`pollux cancel`, `pause`, `resume` and `resize`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from pollux.cli.arguments.options import PARTIAL, Job, Json, complete_jobs, print_json
from pollux.cli.printing.visible import say

__all__ = ["cancel", "pause", "resize", "resume"]

_Jobs = Annotated[list[str], typer.Argument(metavar="JOB", autocompletion=complete_jobs, help="Ids of jobs.")]


def cancel(ctx: typer.Context, jobs: _Jobs, as_json: Json = False) -> None:
    """Cancel jobs for good. They get their grace to save, and end.

    Example: pollux cancel resnet18 bert
    """
    _each(ctx, jobs, "cancel", as_json)


def pause(ctx: typer.Context, jobs: _Jobs, as_json: Json = False) -> None:
    """Take the GPUs from jobs until they are resumed: they save, stop, and keep their progress.

    A script that neither saves by itself nor uses 'pollux.init' starts from the beginning when it is resumed.
    Example: pollux pause resnet18
    """
    _each(ctx, jobs, "pause", as_json)


def resume(ctx: typer.Context, jobs: _Jobs, as_json: Json = False) -> None:
    """Let paused jobs run again: they wait for GPUs like any other.

    Example: pollux resume resnet18
    """
    _each(ctx, jobs, "resume", as_json)


def resize(
    job: Job,
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="RANGE", help="From least to most, such as 2..8, or one number.")
    ],
    as_json: Json = False,
) -> None:
    """Change how many GPUs a job may have; the policy still decides how many it gets.

    Example: pollux resize resnet18 --gpus 2..8
    """
    from pollux.cli.client.client import connect, job_path
    from pollux.wire.quantities import parse_gpus

    parse_gpus(gpus, "--gpus")
    answer = connect().post(job_path(job, "resize"), {"gpus": gpus})
    if as_json:
        print_json(answer)
        return
    changed = answer["job"]
    say(
        f"{job}: may have {_span(changed['min_gpus'], changed['max_gpus'])}, holds {changed['gpus']} "
        f"({changed['state']}); 'pollux explain {job}' tells why"
    )
    if answer.get("note"):
        say(f"  note: {answer['note']}")


def _span(low: int, high: int) -> str:
    most = f"{high} GPU{'s' * (high != 1)}"
    return most if low == high else f"{low} to {most}"


def _each(ctx: typer.Context, jobs: Sequence[str], verb: str, as_json: bool) -> None:
    """Send the request for each job, and raise the errors of single jobs at the end.

    If the service does not answer, the other jobs are left out; the results up to then are printed all the same.
    """
    from pollux.cli.client.client import connect, job_path
    from pollux.core.errors import PolluxError, Unreachable

    client = connect()
    done: list[dict[str, Any]] = []
    failed: list[tuple[str, PolluxError]] = []
    told: dict[str, Any] = {"jobs": done, "failed": []}
    for job in dict.fromkeys(jobs):
        try:
            done.append(client.post(job_path(job, verb))["job"])
        except Unreachable:
            for _, refused in failed:
                say(f"error: {refused}", err=True)
            raise
        except PolluxError as error:
            failed.append((job, error))
            told["failed"].append({"job": job, "code": type(error).__name__, "message": str(error)})
        else:
            if not as_json:
                say(f"{job}: {done[-1]['state']}")
        ctx.meta[PARTIAL] = told
    if as_json:
        print_json(told)
        for _, refused in failed:
            say(f"error: {refused}", err=True)
        if failed:
            raise typer.Exit(failed[-1][1].exit_code)
    for _, refused in failed[:-1]:
        say(f"error: {refused}", err=True)
    if failed:
        raise failed[-1][1]
