"""Executes the controller's commands on a backend, and reconciles the two after a start.

A resize is sent live, or as a stop and a start: `JobRecord.moves_live` in `controller.state.records` is the rule.

What runs between a decision and the first step of a new replica (docs/design/0016 has every call):

- a start: `controller.machine.placing`, `executor.start`, `backends.dispatch.dispatcher` (`submit`, `_launch`),
  `backends.dispatch.shim_client`, `backends.shim.process` (`_launch`), `backends.shim.generation` (`start`),
  `backends.process.fork_replica`, `agent.initialize`, `agent.job.training_loop` (`start`);
- a live resize: `executor.execute`, `backends.dispatch.dispatcher` (`resize`), `backends.dispatch.changes`,
  `backends.shim.process` (`_resize`), `backends.shim.live_generation`, `backends.shim.transition`, then in each replica
  `agent.elastic.step_requests`, `agent.elastic.member`, `agent.elastic.generation_move`, `agent.job.elastic_job`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pollux.backends.protocol import Backend, ReplicasEnded, Running
from pollux.controller import ENDED, HOLDING, Command, JobRecord, JobState, ResizeJob, StartJob, StopJob
from pollux.core import BatchMode, Placement
from pollux.core.errors import PolluxError
from pollux.service.auth.tokens import Tokens
from pollux.service.engine.launch import LaunchContext, environment, launch_for, request_of
from pollux.service.settings import ServiceSettings

__all__ = ["Executor", "Reconciliation", "Refused", "reconcile", "stopped_at", "waits_to_leave"]

_log = logging.getLogger("pollux.service")

Refused = Callable[[str, int, str, bool], None]
"""Called with (job id, generation, why, whether it is the job's fault) when a backend refuses a launch."""


class Executor:
    """Executes commands on one backend."""

    def __init__(
        self, backend: Backend, settings: ServiceSettings, tokens: Tokens, batch: BatchMode, refused: Refused
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._tokens = tokens
        self._batch = batch
        self._refused = refused

    def execute(self, commands: Iterable[Command], jobs: Mapping[str, JobRecord], now: float) -> bool:
        """Execute commands. Commands that free GPUs go first, otherwise in their order.

        False if the backend failed for one of them; the others are executed all the same.
        """
        commands = list(commands)
        live = {id(command) for command in commands if isinstance(command, ResizeJob) and _is_sent_live(command, jobs)}
        stopped = [self._carry_out(self._stop_leaving, command, jobs, id(command) in live) for command in commands]
        started = [self._carry_out(self._start_or_resize, each, jobs, id(each) in live, now) for each in commands]
        return all(stopped) and all(started)

    def _carry_out(self, act: Callable[..., None], command: Command, *context: object) -> bool:
        try:
            act(command, *context)
        except Exception:
            _log.exception("%s could not be executed", command)
            return False
        return True

    def _stop_leaving(self, command: Command, jobs: Mapping[str, JobRecord], live: bool) -> None:
        if isinstance(command, StopJob):
            self.stop(jobs[command.job_id], command.generation)
        elif isinstance(command, ResizeJob) and not live:
            self.stop(jobs[command.job_id], command.generation - 1)

    def _start_or_resize(self, command: Command, jobs: Mapping[str, JobRecord], live: bool, now: float) -> None:
        if isinstance(command, StartJob):
            record = jobs[command.job_id]
            self.start(record, command.generation, command.placement, stopped_at=stopped_at(record, now))
        elif isinstance(command, ResizeJob):
            since = None if live else now
            self.start(jobs[command.job_id], command.generation, command.placement, stopped_at=since, live=live)

    def start(
        self,
        record: JobRecord,
        generation: int,
        placement: Placement,
        stopped_at: float | None = None,
        live: bool = False,
    ) -> None:
        """Launch a generation, or (`live`) resize the running one to it; a refusal is reported to the callback."""
        job_id = record.spec.id
        try:
            url = self._settings.agents_url or self._settings.url
            context = LaunchContext(
                self._settings.home, self._batch, url, self._settings.agents_ca, self._backend.taken_back_seconds,
                os.geteuid(),
            )  # fmt: skip
            variables = environment(context, record, generation, self._tokens.for_job(job_id), stopped_at)
            launch = launch_for(record, generation, placement, variables)
            if live:
                self._backend.resize(launch)
            else:
                self._backend.submit(launch)
        except PolluxError as error:
            self._refused(job_id, generation, str(error), self._is_there(placement))

    def _is_there(self, placement: Placement) -> bool:
        """Whether the backend has these nodes; one may have gone since the decision, which is not the job's fault."""
        sizes = {node.id: node.num_gpus for node in self._backend.inventory()}
        return all(count <= sizes.get(node, 0) for node, count in placement)

    def stop(self, record: JobRecord, generation: int) -> None:
        """Stop a job's replicas up to a generation, with the grace of its request."""
        self._backend.stop(record.spec.id, generation, request_of(record).grace_seconds)


def _is_sent_live(command: ResizeJob, jobs: Mapping[str, JobRecord]) -> bool:
    """Whether this one command goes to the backend as a live resize; if not, as a stop and a start.

    The rule is `JobRecord.moves_live`.
    """
    record = jobs[command.job_id]
    return record.moves_live and record.spec.request is not None


def stopped_at(record: JobRecord, now: float) -> float | None:
    """When the pause of a restart begins; the agent reports its end. None for a job that never ran before.

    It begins with the decision to start, since the time without GPUs does not count.
    """
    return now if record.held_seconds > 0 else None


def waits_to_leave(job_id: str, running: Iterable[Running], is_resizing: Callable[[str], bool]) -> str:
    """Which jobs must leave before a job's replicas can start, as a sentence; empty if they do not wait. Pure.

    A restart counts, too: the next generation waits until the job's own replicas have ended.
    """
    entries = {entry.job_id: entry for entry in running}
    if job_id not in entries or entries[job_id].state != "waiting":
        return ""
    leaving = [
        f"'{other}'"
        for other, entry in entries.items()
        if entry.state == "stopping" or (other != job_id and entry.state == "waiting" and is_resizing(other))
    ]
    if leaving:
        return f"waits for {', '.join(leaving)} to leave"
    return "waits for its earlier replicas to leave" if is_resizing(job_id) else "waits for its GPUs to become free"


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What to do so that the backend runs what the log says."""

    start: tuple[JobRecord, ...] = ()
    change: tuple[JobRecord, ...] = ()
    ended: tuple[ReplicasEnded, ...] = ()
    stop: tuple[tuple[str, int], ...] = ()
    forget: tuple[str, ...] = ()


def reconcile(jobs: Mapping[str, JobRecord], running: Iterable[Running]) -> Reconciliation:
    """Compare the log with what the backend runs. Pure.

    A job with GPUs whose generation the backend does not know starts again, with the same generation number. Ends that
    were not reported yet are reported. Replicas that are not in the log are stopped, and forgotten once their job has
    ended. A live resize that did not reach the backend is ordered again, without stopping anything.
    """
    there = {entry.job_id: entry for entry in running}
    behind = [(record, there.get(job_id)) for job_id, record in jobs.items() if _is_behind(record, there.get(job_id))]
    todo = [(entry, _todo(jobs.get(entry.job_id), entry)) for entry in there.values()]
    return Reconciliation(
        start=tuple(record for record, entry in behind if not _is_to_change(record, entry)),
        change=tuple(record for record, entry in behind if _is_to_change(record, entry)),
        ended=tuple(entry.ended for entry, what in todo if what == "ended" and entry.ended is not None),
        stop=tuple((entry.job_id, entry.generation) for entry, what in todo if what == "stop"),
        forget=tuple(entry.job_id for entry, what in todo if what == "forget"),
    )


def _is_behind(record: JobRecord, entry: Running | None) -> bool:
    """Whether a job holds GPUs and the backend does not know its generation."""
    return record.state in HOLDING and (entry is None or entry.generation < record.generation)


def _todo(record: JobRecord | None, entry: Running) -> Literal["ended", "forget", "stop"] | None:
    """What to do about replicas of the backend; None: nothing."""
    if entry.state != "ended":
        return None if _is_wanted(record, entry) else "stop"
    return "forget" if record is None or record.state in ENDED else "ended"


def _is_wanted(record: JobRecord | None, entry: Running) -> bool:
    """Whether running replicas are those in the log, or will be resized to them."""
    if record is None or record.state not in HOLDING:
        return False
    return entry.generation == record.generation or _is_to_change(record, entry)


def _is_to_change(record: JobRecord, entry: Running | None) -> bool:
    """Whether an earlier generation runs that a live resize was to turn into the one in the log."""
    if entry is None or entry.state not in ("running", "waiting") or entry.generation >= record.generation:
        return False
    return record.state is JobState.RESIZING and record.moves_live and record.spec.request is not None
