"""`pollux submit`: submits job files or a command, with changes by options, and prints the plan for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from pollux.cli.arguments.options import PARTIAL, Json, complete_jobs, complete_queues, print_json
from pollux.cli.printing.visible import say
from pollux.core.errors import InvalidInput, WorkdirMissing

if TYPE_CHECKING:
    from pollux.cli.client.client import Client
    from pollux.wire.job import JobRequest

__all__ = ["app", "requests_from", "submit", "variables_from"]

_COMMAND = "pollux.command"


class _AfterDashes(TyperCommand):
    """Reads everything after `--` as the command to run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", "[FILE... | -- COMMAND...]"]


app = typer.Typer()


@app.command(cls=_AfterDashes)
def submit(
    ctx: typer.Context,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Job files.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The job's name.")] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="RANGE", help="From least to most GPUs, such as 1..4, or one number.")
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", autocompletion=complete_queues, help="The queue to put it in.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="low|normal|high", help="How much the job counts beside others.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="A variable; may be repeated.")
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB", autocompletion=complete_jobs, help="Start after that job; may be repeated."),
    ] = None,
    ship: Annotated[
        bool | None,
        typer.Option(
            "--ship/--no-ship",
            help="Send the working folder, or never send it. By default it is sent if the service does not have it.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the request; submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the jobs have ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print the job's output until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Submit jobs and print the plan for each: when it starts, on how many GPUs, and when it should end.

    Options replace what is in the file. Example: pollux submit job.yaml --gpus 2..8
    """
    from pollux.cli.client.client import connect

    given = {"name": name, "gpus": gpus, "queue": queue, "priority": priority, "after": after}
    changes = {key: value for key, value in given.items() if value}
    requests = requests_from(files or [], ctx.meta.get(_COMMAND), changes, variables_from(env or []))
    if follow:
        _check_follow(len(requests), as_json, dry_run)
    sender = _Sender(connect(), ship, dry_run, as_json)
    answers = sender.send(requests, ctx)
    if as_json and not wait:
        print_json(ctx.meta[PARTIAL])
    if not dry_run and (wait or follow):
        _finish(sender, answers, follow)


def _check_follow(num_jobs: int, as_json: bool, dry_run: bool) -> None:
    if num_jobs > 1 or as_json or dry_run:
        raise InvalidInput("--follow prints the output of one job: give one file, without --json and --dry-run")


def requests_from(
    files: Sequence[Path],
    command: Sequence[str] | None,
    changes: Mapping[str, Any],
    variables: Mapping[str, str],
) -> list[JobRequest]:
    """The jobs to submit; all are read and checked before the first is sent."""
    from pollux.wire.jobfile import check_paths, parse_job

    if bool(files) == bool(command):
        raise InvalidInput("give job files, or a command after '--': pollux submit --gpus 1..4 -- python train.py")
    if len(files) > 1 and "name" in changes:
        raise InvalidInput(f"--name is '{changes['name']}' for {len(files)} files; give one file")
    requests = []
    for where, source in _sources(files, command or ()):
        mapping = {**source, **changes}
        if variables:
            mapping["env"] = {**mapping.get("env", {}), **variables}
        requests.append(parse_job(mapping, workdir=os.getcwd(), where=where))
    missing = [line for request in requests for line in check_paths(request)]
    if missing:
        raise InvalidInput("; ".join(missing))
    return requests


def _sources(files: Sequence[Path], command: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The source of each job (a file or the command line), and its content."""
    from pollux.wire.jobfile import job_to_mapping, read_job_file

    for file in files:
        yield str(file), job_to_mapping(read_job_file(file))
    if command:
        yield "command line", {"run": list(command), "workdir": os.getcwd()}


def variables_from(pairs: Sequence[str]) -> dict[str, str]:
    """Variables from KEY=VALUE words; a word without `=` names a variable of this process."""
    variables = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            if key not in os.environ:
                raise InvalidInput(f"--env is '{pair}': give KEY=VALUE, or the name of a variable that is set here")
            value = os.environ[key]
        variables[key] = value
    return variables


@dataclass(frozen=True, slots=True)
class _Sender:
    """Submits or plans jobs, sends working folders, and prints the plan of each job.

    `ship`: True to send every working folder, False to send none, None to send those that the service does not have.
    """

    client: Client
    ship: bool | None
    dry_run: bool
    as_json: bool

    def send(self, requests: Sequence[JobRequest], ctx: typer.Context) -> list[dict[str, Any]]:
        """The answer to each request; `ctx` keeps the answers before a refusal."""
        if self.ship and not self.dry_run:
            requests = [self._with_folder(request) for request in requests]
        answers: list[dict[str, Any]] = []
        for request in requests:
            answers.append(self._send_or_ship(request))
            ctx.meta[PARTIAL] = {"planned" if self.dry_run else "submitted": answers}
        return answers

    def _send_or_ship(self, request: JobRequest) -> dict[str, Any]:
        if self.dry_run and self.ship:
            return self._plan_with_folder(request)
        try:
            return self._send(request)
        except WorkdirMissing:
            if self.ship is not None:
                raise
        return self._plan_with_folder(request) if self.dry_run else self._send(self._with_folder(request))

    def _with_folder(self, request: JobRequest) -> JobRequest:
        """Send the request's folder, and print a line about it; the request with the folder there."""
        from pollux.cli.client.folder_upload import ship

        request, said = ship(self.client, request, bool(self.ship))
        say(said, err=self.as_json)
        return request

    def _send(self, request: JobRequest) -> dict[str, Any]:
        from pollux.cli.display.plan_text import plan_lines
        from pollux.wire.jobfile import job_to_mapping

        body = job_to_mapping(request)
        if self.dry_run:
            answer = {"request": body, "plan": self.client.post("/v1/plan", body)}
        else:
            answer = self.client.submit(body)
        if not self.as_json:
            for line in plan_lines(answer["plan"], self.client.now, planned=self.dry_run):
                say(line)
            if self.dry_run:
                _echo(body)
        return answer

    def _plan_with_folder(self, request: JobRequest) -> dict[str, Any]:
        """The dry run of a job whose folder would be sent; without the folder, the service cannot plan it."""
        from pollux.cli.client.folder_upload import would_ship
        from pollux.wire.jobfile import job_to_mapping

        request, missing = would_ship(self.client, request, bool(self.ship))
        if not missing:
            return self._send(request)
        body = job_to_mapping(request)
        if not self.as_json:
            say(missing)
            _echo(body)
        return {"request": body, "plan": None}


def _echo(body: Mapping[str, Any]) -> None:
    import json

    say(json.dumps(body, indent=2, ensure_ascii=False))


def _finish(sender: _Sender, answers: list[dict[str, Any]], follow: bool) -> None:
    """Wait until the jobs have ended, and print how they ended."""
    from pollux.cli.commands.jobs.logs import follow_log, write_log

    client, jobs = sender.client, [str(answer["job"]["id"]) for answer in answers]
    try:
        for job in jobs:
            follow_log(client, job, 0, 0, write_log if follow else lambda _: None)
    except KeyboardInterrupt:
        say(f"stopped waiting; still running: {', '.join(jobs)}. To end: pollux cancel {' '.join(jobs)}", err=True)
        raise typer.Exit(130) from None
    _report(client, jobs, answers if sender.as_json else None)


def _report(client: Client, jobs: Sequence[str], answers: list[dict[str, Any]] | None) -> None:
    from pollux.cli.client.client import job_path

    ended = [client.get(job_path(job))["job"] for job in jobs]
    if answers is not None:
        print_json({"submitted": [{**answer, "job": job} for answer, job in zip(answers, ended, strict=True)]})
    for job in ended:
        if answers is None:
            say(f"{job['id']}: {job['state']}{job.get('detail') and ': ' + job['detail']}", err=True)
    if any(job["state"] != "succeeded" for job in ended):
        raise typer.Exit(1)
