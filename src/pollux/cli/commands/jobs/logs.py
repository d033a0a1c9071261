"""`pollux logs`: the output of a job's replicas."""

from __future__ import annotations

import functools
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli.arguments.options import Job, Json, print_json, whole
from pollux.core.errors import InvalidInput, PolluxError, Unreachable
from pollux.wire.visible_text import visible_log

if TYPE_CHECKING:
    from pollux.cli.client.client import Client

__all__ = ["ENDED_STATES", "end_of", "follow_log", "logs", "read_log", "tail_of", "write_log"]

ENDED_STATES = frozenset({"succeeded", "failed", "cancelled"})
"""The final states of a job; named here so that `logs` does not import the controller."""

_CHUNK = 65536
_POLL_SECONDS = 0.5
_LONGEST_ABSENCE_SECONDS = 10.0


def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until the job has ended.")] = False,
    replica: Annotated[int, typer.Option(metavar="N", parser=whole(0), help="Which replica.")] = 0,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", parser=whole(0), help="Only the last N lines.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let colours and other control codes through to the terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the output of a job: of one replica, over all its re-allocations.

    On a terminal, control codes are made visible. Example: pollux logs -f --tail 20 resnet18
    """
    from pollux.cli.client.client import connect

    if as_json and follow:
        raise InvalidInput("--follow prints lines as they come and --json one document at the end: leave one out")
    client = connect()
    write = functools.partial(write_log, raw=raw)
    if as_json or tail is not None:
        text, offset = tail_of(client, job, replica, tail)
        if as_json:
            print_json({"job_id": job, "replica": replica, "text": text, "offset": offset})
            return
        write(text)
    else:
        offset = 0
        for text, behind in read_log(client, job, replica, 0, end_of(client, job, replica)):
            write(text)
            offset = behind
    if follow:
        try:
            follow_log(client, job, replica, offset, write)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def tail_of(client: Client, job: str, replica: int, lines: int | None) -> tuple[str, int]:
    """The last `lines` lines of a log (None: all), and the offset after them."""
    end, size = end_of(client, job, replica), _CHUNK
    while True:
        start = 0 if lines is None else max(0, end - size)
        pieces = list(read_log(client, job, replica, start, end))
        text = "".join(text for text, _ in pieces)
        offset = pieces[-1][1] if pieces else start
        if lines is None:
            return text, offset
        if text.count("\n") > lines or start == 0 or size >= 2**26:
            # Unlike `splitlines`, this keeps a progress bar, which returns with "\r", as one line.
            kept = io.StringIO(text).readlines()
            return "".join(kept[len(kept) - min(lines, len(kept)) :]), offset
        size *= 8


def end_of(client: Client, job: str, replica: int) -> int:
    """The offset of a log's present end."""
    from pollux.cli.client.client import job_path

    since = time.monotonic()
    while True:
        answer: dict[str, Any] = client.get(job_path(job, "logs"), replica=replica, offset=-1, limit=1)
        if answer["at_end"]:
            return int(answer["offset"])
        if time.monotonic() - since > _LONGEST_ABSENCE_SECONDS:
            raise PolluxError(
                f"the log of replica {replica} of job '{job}' cannot be read by the service: "
                "see the service's log, and the permissions of the job's log folder"
            )
        # Its file could not be read at that moment, for instance while it was replaced by a new one.
        time.sleep(_POLL_SECONDS)


def read_log(client: Client, job: str, replica: int, offset: int, end: int | None = None) -> Iterator[tuple[str, int]]:
    """Pieces of a log, each with the offset after it: up to `end`, or until there is no more output.

    Without `end`, this may go on for ever if the job writes fast.
    """
    from pollux.cli.client.client import job_path

    while end is None or offset < end:
        limit = _CHUNK if end is None else min(_CHUNK, end - offset)
        answer: dict[str, Any] = client.get(job_path(job, "logs"), replica=replica, offset=offset, limit=limit)
        offset = int(answer["offset"])
        yield str(answer["text"]), offset
        if answer["at_end"]:
            return


def follow_log(
    client: Client, job: str, replica: int, offset: int, write: Callable[[str], None], patience: float = 60.0
) -> str:
    """Write new output until the job has ended; its last state. Waits for a while if the service does not answer."""
    from pollux.cli.client.client import job_path

    lost_at: float | None = None
    while True:
        try:
            # The state is read before the log: the log of an ended job is complete, so nothing is missed.
            state = str(client.get(job_path(job))["job"]["state"])
            for text, end in read_log(client, job, replica, offset):
                write(text)
                offset = end
            lost_at = None
        except Unreachable as error:
            lost_at = time.monotonic() if lost_at is None else lost_at
            if time.monotonic() - lost_at > patience:
                raise PolluxError(f"{error}; gave up after {patience:.0f} s") from error
            state = ""
        if state in ENDED_STATES:
            return state
        time.sleep(_POLL_SECONDS)


def write_log(text: str, raw: bool = False) -> None:
    """Print output of a job. On a terminal its control codes are made visible, unless `raw`.

    Otherwise a job could rewrite the screen, or make the terminal send input. Pipes and files get every byte.
    """
    sys.stdout.write(text if raw or not sys.stdout.isatty() else visible_log(text))
    sys.stdout.flush()
