"""Handles the messages of the jobs' shims, and the end of a shim."""

from __future__ import annotations

import contextlib
import logging
import time

from pollux.backends.dispatch.job_table import DispatchedJob, HeldGeneration, JobTable
from pollux.backends.dispatch.shim_client import ShimClient, find_shim
from pollux.backends.dispatch.site import Site
from pollux.backends.dispatch.worker_thread import WorkerThread
from pollux.backends.nodes.slot import read_slots
from pollux.backends.process.records import (
    ended_from,
    ended_to,
    newest_generation,
    read_ended,
    read_order,
    record_path,
    write_record,
)
from pollux.backends.process.replica_env import run_id
from pollux.backends.protocol import ReplicasEnded, ReplicasLost, ReplicasStarted
from pollux.core.errors import BackendFailed
from pollux.wire.live.messages import (
    AlarmMessage,
    EndedMessage,
    LostMessage,
    RefusedMessage,
    ShimMessage,
    StartedMessage,
    StatusMessage,
    StatusRequest,
)

__all__ = ["ShimEvents"]

_log = logging.getLogger("pollux.backends")

_HELLO_SECONDS = 5.0
_SWEEP_SECONDS = 0.05
_MAX_ATTEMPTS = 3


class ShimEvents:
    """Reads messages of shims and notes them in the table of jobs; counts `false_alarms` and `refusals`."""

    def __init__(self, table: JobTable, thread: WorkerThread, site: Site) -> None:
        self._table, self._thread, self._site = table, thread, site
        self.false_alarms = 0
        self.refusals = 0

    def follow(self, job: DispatchedJob, link: ShimClient) -> None:
        """Handle the messages of the job's shim from now on."""
        job.link = link
        self._thread.watch(link.peer, lambda: self.read_messages(job))

    def await_hellos(self) -> None:
        """Wait for the status of every shim: its last launch may not be on disk yet."""
        jobs = self._table.jobs
        waiting = {job.id: job.link for job in jobs.values() if job.link is not None}
        for link in waiting.values():
            link.send(StatusRequest())
        deadline = time.monotonic() + _HELLO_SECONDS
        for job_id, link in waiting.items():
            while link.warm is None and jobs[job_id].link is link and time.monotonic() < deadline:
                link.peer.settimeout(max(0.01, deadline - time.monotonic()))
                self.read_messages(jobs[job_id])
            if jobs[job_id].link is link:
                link.peer.settimeout(_HELLO_SECONDS)

    def read_messages(self, job: DispatchedJob) -> None:
        """Handle new messages of the job's shim, or its end."""
        if job.link is None:
            return
        messages = job.link.receive()
        if messages is None:
            self._thread.unwatch(job.link.peer)
            job.link.close()
            job.link = None
            self._shim_ended(job)
            return
        for message in messages:
            try:
                self.handle(job, job.link, message)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # Messages after it are still handled.
                _log.warning(
                    "what the shim of job '%s' said cannot be used (%s: %.200s): see %s/shim.log",
                    job.id, type(error).__name__, error, job.folder,
                )  # fmt: skip

    def handle(self, job: DispatchedJob, link: ShimClient, message: ShimMessage) -> None:
        """Handle one message."""
        if self._site.handle_message(job, message):
            return
        if isinstance(message, AlarmMessage):
            self.false_alarms += 1
            _log.warning("false alarm %d: %s (job '%s')", self.false_alarms, message.text, job.id)
            return
        if isinstance(message, RefusedMessage):
            self.refusals += message.many
            _log.warning("%s (job '%s')", message.text, job.id)
            return
        if isinstance(message, StatusMessage):
            self._note_status(job, link, message)
        held = job.now
        if held is not None and held.ended is None:
            self._note_progress(job, held, message)

    def _note_status(self, job: DispatchedJob, link: ShimClient, status: StatusMessage) -> None:
        """Note the state of a shim, and its generation where an earlier service started it."""
        link.warm = status.warm
        if job.now is None and status.generation is not None:
            self._learn(job, status.generation)
        held = job.now
        if held is None or held.launch is not None:
            return
        if status.moving:
            # An earlier service ordered the resize: the shim reports its completion.
            held.started = False
        elif held.live and held.started and not held.ended:
            # The resize may have been completed while no service was connected.
            self._table.report(_started(job.id, StartedMessage(time.time(), held.generation, pause=status.pause)))

    def _note_progress(self, job: DispatchedJob, held: HeldGeneration, message: ShimMessage) -> None:
        """Note the end, a loss or the start of the running generation."""
        match message:
            case EndedMessage(ended):
                self._table.finish(job, ended_from(ended))
            case LostMessage():
                self._note_loss(job, held, message)
            case StartedMessage():
                self._note_start(job, held, message)
            case StatusMessage(ended=ended) if ended is not None and ended["generation"] == held.generation:
                self._table.finish(job, ended_from(ended))
            case StatusMessage(lost=lost) if lost is not None:
                self._note_loss(job, held, lost)
            case StatusMessage(generation=generation, moving=False, pause=pause) if generation is not None:
                self._note_start(job, held, StartedMessage(time.time(), generation, pause=pause))

    def _note_start(self, job: DispatchedJob, held: HeldGeneration, message: StartedMessage) -> None:
        if held.started or message.generation != held.generation:
            return
        held.places = read_slots(message.places) or held.target or held.places
        held.started, held.kept = True, None
        self._table.keep_slots(job)
        self._table.report(_started(job.id, message))

    def _note_loss(self, job: DispatchedJob, held: HeldGeneration, message: LostMessage) -> None:
        """Report a loss once, and note the slots of the replicas that can go on."""
        kept = read_slots(message.kept)
        if message.generation != held.generation or held.stop_grace is not None or held.kept == kept:
            return
        held.kept = kept
        remaining = self._table.slots.placement(kept)
        self._table.report(
            ReplicasLost(
                message.at,
                job.id,
                message.generation,
                message.replicas,
                remaining,
                message.why,
                withdrawn=message.withdrawn,
            )
        )

    def _learn(self, job: DispatchedJob, generation: int) -> None:
        """Note a generation that its shim got just before the earlier service ended."""
        record = read_order(job.folder, generation)
        job.newest = max(job.newest, generation)
        places, live = read_slots(record.get("places", ())), bool(record.get("live"))
        job.now = HeldGeneration(generation, started=True, sent=True, places=places, live=live)
        self._table.slots.mark_held(job.id, places)

    # The end of a shim

    def _shim_ended(self, job: DispatchedJob) -> None:
        held = job.now
        if held is None or held.ended is not None or not held.sent:
            return
        link = find_shim(job.id, job.folder)
        if link is not None:
            # The shim runs, and only the connection broke.
            self.follow(job, link)
            link.send(StatusRequest())
            return
        ended = read_ended(job.folder, held.generation)
        if ended is not None:
            self._table.finish(job, ended)
        elif newest_generation(job.folder) == held.generation:
            self.lose(job)
        elif held.attempts + 1 < _MAX_ATTEMPTS:
            # The shim ended before it read the launch, so it has started nothing.
            held.attempts += 1
            held.sent = False
        else:
            why = f"its shim ended before it could start anything: see {job.folder}/shim.log"
            self._table.end_unstarted(job, held, "crashed", why)

    def lose(self, job: DispatchedJob) -> None:
        """Handle a shim that is gone: kill what is left of its replicas, then report the generation as lost."""
        job.sweeping = True
        held = job.now
        assert held is not None
        # Its name is known; what the record says, a job may have changed to outlive its end.
        name = run_id(job.folder.parents[1], job.id, held.generation)
        record = {**read_order(job.folder, held.generation), "run_id": name}
        if not self._table.slots.ends_all(record):
            self._thread.after(_SWEEP_SECONDS, lambda: self.lose(job))
            return
        job.sweeping = False
        why = "its shim ended, and its replicas with it"
        ended = ReplicasEnded(time.time(), job.id, held.generation, "lost", (), why)
        with contextlib.suppress(BackendFailed):
            write_record(record_path(job.folder, "ended", held.generation), ended_to(ended))
        self._table.finish(job, ended)


def _started(job_id: str, message: StartedMessage) -> ReplicasStarted:
    pause = message.pause
    seconds, kind = (None, "") if pause is None else (pause.pause_seconds, pause.kind)
    return ReplicasStarted(message.at, job_id, message.generation, seconds, kind)
