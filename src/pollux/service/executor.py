"""Carries the controller's commands out on a backend, and says at a start what the two do not agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pollux.backends.protocol import Backend, ReplicasEnded, Running
from pollux.controller import ENDED, HOLDING, Command, JobRecord, ResizeJob, StartJob, StopJob
from pollux.core import BatchMode, Placement
from pollux.core.errors import PolluxError
from pollux.service.launching import environment, launch_for, request_of
from pollux.service.settings import ServiceSettings
from pollux.service.tokens import Tokens

__all__ = ["Executor", "Reconciliation", "reconcile"]

Refused = Callable[[str, int, str], None]
"""Told (job id, generation, why) when a backend does not take a launch."""


class Executor:
    """One backend, and everything that its launches need to know."""

    def __init__(
        self, backend: Backend, settings: ServiceSettings, tokens: Tokens, batch: BatchMode, refused: Refused
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._tokens = tokens
        self._batch = batch
        self._refused = refused

    def execute(self, commands: Iterable[Command], jobs: Mapping[str, JobRecord], now: float) -> None:
        """Do what was decided; leavers are all told before anybody starts, as the commands' order has it."""
        for command in commands:
            if isinstance(command, StopJob):
                self.stop(jobs[command.job_id], command.generation)
            elif isinstance(command, ResizeJob):
                self.stop(jobs[command.job_id], command.generation - 1)
        for command in commands:
            if isinstance(command, StartJob):
                self.start(jobs[command.job_id], command.generation, command.placement)
            elif isinstance(command, ResizeJob):
                self.start(jobs[command.job_id], command.generation, command.placement, stopped_at=now)

    def start(self, record: JobRecord, generation: int, placement: Placement, stopped_at: float | None = None) -> None:
        """Launch a generation; a refusal is told, never raised."""
        job_id = record.spec.id
        try:
            variables = environment(
                record, self._settings.home, self._batch, self._settings.url, self._tokens.for_job(job_id),
                generation, stopped_at,
            )  # fmt: skip
            self._backend.submit(launch_for(record, generation, placement, variables))
        except PolluxError as error:
            self._refused(job_id, generation, str(error))

    def stop(self, record: JobRecord, generation: int) -> None:
        """End a job's replicas up to a generation, with the grace that its user gave."""
        self._backend.stop(record.spec.id, generation, request_of(record).grace_seconds)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What must be done for the backend to hold what the log says."""

    start: tuple[JobRecord, ...] = ()
    ended: tuple[ReplicasEnded, ...] = ()
    stop: tuple[tuple[str, int], ...] = ()
    forget: tuple[str, ...] = ()


def reconcile(jobs: Mapping[str, JobRecord], running: Iterable[Running]) -> Reconciliation:
    """Compare what the log says with what the backend has. Pure.

    A job that holds GPUs and whose generation the backend does not know starts again, under the same generation;
    one that ended meanwhile is told; what the log does not hold is stopped, and forgotten once its job has ended.
    """
    start: list[JobRecord] = []
    ended: list[ReplicasEnded] = []
    stop: list[tuple[str, int]] = []
    forget: list[str] = []
    there = {entry.job_id: entry for entry in running}
    for job_id, record in jobs.items():
        entry = there.get(job_id)
        if record.state in HOLDING and (entry is None or entry.generation < record.generation):
            start.append(record)
    for job_id, entry in there.items():
        known = jobs.get(job_id)
        over = known is None or known.state in ENDED
        if entry.state == "ended":
            if entry.ended is not None and not over:
                ended.append(entry.ended)
            elif over:
                forget.append(job_id)
        elif known is None or known.state not in HOLDING or entry.generation != known.generation:
            stop.append((job_id, entry.generation))
    return Reconciliation(tuple(start), tuple(ended), tuple(stop), tuple(forget))
