"""Workloads: which jobs arrive when, and what their users would have asked for."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.core import InvalidInput, choices
from pollux.sim.applications.application import Application
from pollux.sim.applications.tables import Row, number, read_rows, text, whole

__all__ = ["FIELDS", "Workload", "WorkloadJob", "check_applications", "read_workload", "write_workload"]

FIELDS = ("name", "time", "application", "num_replicas", "batch_size")
"""Columns of a workload file, in order."""


# A year; a larger number is probably a date in seconds.
_MOST_SECONDS = 366 * 86_400


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """One line of a workload: submission second, and the GPUs and total batch its user would have chosen.

    Files have no `group` and no `deadline` (seconds from the workload's start); both are as in `JobView`.
    """

    name: str
    time: float
    application: str
    num_gpus: int
    batch_size: int
    source: str = ""
    group: str = ""
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of submission."""

    name: str
    jobs: tuple[WorkloadJob, ...]


def read_workload(path: Path) -> Workload:
    """Read `name,time,application,num_replicas,batch_size`."""
    jobs: list[WorkloadJob] = []
    lines: dict[str, int] = {}
    for row in read_rows(path, FIELDS):
        name = text(row, "name")
        if name in lines:
            raise row.error("name", name, f"was used in line {lines[name]} already; give every job its own")
        lines[name] = row.line
        jobs.append(
            WorkloadJob(
                name=name,
                time=_time(row),
                application=text(row, "application"),
                num_gpus=whole(row, "num_replicas", minimum=1),
                batch_size=whole(row, "batch_size", minimum=1),
                source=f"{path}, line {row.line}",
            )
        )
    if not jobs:
        raise InvalidInput(f"{path}: no jobs in it; give at least one line below the header")
    return Workload(path.stem, tuple(sorted(jobs, key=lambda job: job.time)))


def _time(row: Row) -> float:
    seconds = number(row, "time")
    if seconds > _MOST_SECONDS:
        raise row.error("time", f"{seconds:g}", f"give seconds from the workload's start, at most {_MOST_SECONDS:g}")
    return seconds


def check_applications(workload: Workload, applications: Mapping[str, Application], num_gpus: int) -> None:
    """Refuse a workload that these applications and a cluster of `num_gpus` cannot run."""
    for job in workload.jobs:
        where = job.source or f"job '{job.name}'"
        application = applications.get(job.application)
        if application is None:
            raise InvalidInput(
                f"{where}, field 'application': '{job.application}': no such profile; "
                f"{choices(job.application, applications)}"
            )
        if job.num_gpus > num_gpus:
            raise InvalidInput(
                f"{where}, field 'num_replicas': '{job.num_gpus}': the cluster has {num_gpus} GPUs; "
                "ask for fewer, or give it more (--nodes, --gpus-per-node)"
            )
        limits = application.limits
        if not limits.initial <= job.batch_size <= limits.maximum:
            raise InvalidInput(
                f"{where}, field 'batch_size': '{job.batch_size}': {job.application} takes "
                f"{limits.initial} to {limits.maximum}; choose one of these"
            )
        if job.num_gpus * limits.local_min > job.batch_size:
            raise InvalidInput(
                f"{where}, field 'num_replicas': '{job.num_gpus}': a batch of {job.batch_size} gives each GPU fewer "
                f"than the {limits.local_min} samples that {job.application} needs; ask for at most "
                f"{job.batch_size // limits.local_min}, or a larger batch_size"
            )


def write_workload(jobs: Iterable[WorkloadJob]) -> str:
    """The CSV text of a workload."""
    text_buffer = io.StringIO()
    writer = csv.writer(text_buffer, lineterminator="\n")
    writer.writerow(FIELDS)
    for job in jobs:
        writer.writerow(
            [
                job.name,
                int(job.time) if job.time == int(job.time) else job.time,
                job.application,
                job.num_gpus,
                job.batch_size,
            ]
        )
    return text_buffer.getvalue()
