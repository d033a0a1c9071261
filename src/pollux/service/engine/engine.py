"""The service without HTTP: everything that can be asked of it.

All methods may be called from any thread. Those named `begin_` return a future at once, the others wait for the answer.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pollux.backends.protocol import LogChunk, Running
from pollux.controller import (
    ENDED,
    JobCancelled,
    JobLimitsChanged,
    JobPaused,
    JobRecord,
    JobResumed,
    JobState,
    JobSubmitted,
    QueueChanged,
)
from pollux.controller.messages.events import Event, JobSpec
from pollux.controller.messages.job_spec import spec_from
from pollux.core import Queue
from pollux.core.errors import Conflict, IllegalTransition, InvalidInput, UnknownName, Unreachable, WorkdirMissing
from pollux.core.version import __version__
from pollux.service.engine.decision_thread import STOPPING, pass_on
from pollux.service.engine.event_log import Facts
from pollux.service.engine.executor import waits_to_leave
from pollux.service.engine.forecast import Forecast
from pollux.service.engine.launch import folders_of, store_of
from pollux.service.engine.loop import EngineLoop
from pollux.service.engine.notices import note_on_notice
from pollux.service.engine.report_events import check_report, fact_of, row_of
from pollux.service.engine.storage_check import note_on_store, require_store
from pollux.service.views.fairness import Fairness
from pollux.service.views.job_board import Board
from pollux.service.views.job_events import Line
from pollux.service.views.projector import nodes_of, queues_of
from pollux.store.protocol import TelemetryRow
from pollux.wire.codec import encode_json
from pollux.wire.job import JobRequest
from pollux.wire.jobfile import check_paths, is_elsewhere
from pollux.wire.report import Report, ReportReply
from pollux.wire.status import JobStatus, NodeStatus, Plan, QueueStatus, ServiceStatus

__all__ = ["Engine"]

_KEPT_KEYS = 256
_NAMED_REPLICAS = 10
_JOB_FOLDERS = ("checkpoints", "logs", "receipts")
_SHIP = "'pollux submit --ship' sends yours along"


class Engine(EngineLoop):
    """Submits, lists and steers jobs. Errors are `PolluxError`s; a refusal changes nothing."""

    # Jobs

    def begin_submit(self, request: JobRequest, key: str | None = None) -> Future[tuple[JobStatus, Plan]]:
        """Take a job in. The same idempotency `key` with the same request gives the same job again."""
        answer: Future[tuple[JobStatus, Plan]] = Future()
        taken: list[str] = []

        def facts(at: float) -> Facts:
            self._refuse_if_stopping()
            job_id, known = self._keyed_id(request, key)
            taken.append(job_id)
            return Facts() if known else Facts(JobSubmitted(at, self._spec(request, job_id)))

        def reply() -> tuple[JobStatus, Forecast]:
            job_id = taken[0]
            return self.job(job_id), Forecast.of(self.runner.controller, job_id, self.runner.now())

        self._then_plan(self._ask(facts, reply), answer)
        return answer

    def _refuse_if_stopping(self) -> None:
        if self.stopping:
            raise Unreachable(STOPPING)

    def submit(self, request: JobRequest, key: str | None = None) -> tuple[JobStatus, Plan]:
        """Take a job in; what became of it and what will."""
        return self._wait(self.begin_submit(request, key))

    def begin_plan(self, request: JobRequest) -> Future[Plan]:
        """What would happen to a job if it were submitted now; nothing changes."""
        answer: Future[tuple[None, Plan]] = Future()

        def reply() -> tuple[None, Forecast]:
            self._refuse_if_stopping()
            job_id = self._free_id(request.name)
            now = self.runner.now()
            return None, Forecast.of_new(self.runner.controller, self._spec(request, job_id), now)

        self._then_plan(self._look(reply), answer)
        plan: Future[Plan] = Future()
        answer.add_done_callback(lambda done: pass_on(done, plan, lambda both: both[1]))
        return plan

    def plan(self, request: JobRequest) -> Plan:
        """What would happen to a job if it were submitted now."""
        return self._wait(self.begin_plan(request))

    def _spec(self, request: JobRequest, job_id: str) -> JobSpec:
        cost = self.settings.resize_seconds
        if cost is None:
            cost = self.backend.live_seconds if request.is_live else self.backend.restart_seconds
        return spec_from(request, job_id, cost, max(self.runner.controller.cluster.num_gpus, 1))

    def _then_plan(self, looked: Future[Any], answer: Future[Any]) -> None:
        """Let the policy's thread work the plan out: it takes as long as a decision."""

        def planned(done: Future[Any]) -> None:
            if done.exception() is not None:
                pass_on(done, answer, lambda both: both)
                return
            status, forecast = done.result()
            plan = self._thinker.plan(forecast)
            plan.add_done_callback(lambda told: pass_on(told, answer, lambda found: (status, found)))

        looked.add_done_callback(planned)

    def _keyed_id(self, request: JobRequest, key: str | None) -> tuple[str, bool]:
        """The id for a new job, and whether this very submission was taken before."""
        digest = hashlib.sha256(encode_json(request).encode()).hexdigest()
        keys = self._keys()
        job_id, known_digest = ("", "") if key is None else keys.get(key, ("", ""))
        if job_id in self.runner.controller.jobs:
            if known_digest != digest:
                raise Conflict(f"idempotency key '{key}' was used for another job; use a new key for a new job")
            return job_id, True
        job_id = self._free_id(request.name)
        # Keys that lead to a name which is free are of submissions that were refused: their job is not the one to come.
        kept = OrderedDict((name, entry) for name, entry in keys.items() if entry[0] != job_id)
        if key is not None:
            # Written before the job: after a crash in between, it leads to no job, and the job is taken in then.
            kept[key] = (job_id, digest)
            while len(kept) > _KEPT_KEYS:
                kept.popitem(last=False)
        if kept != keys:
            self.store.set_setting("idempotency", json.dumps(kept))
        return job_id, False

    def _keys(self) -> OrderedDict[str, tuple[str, str]]:
        kept = json.loads(self.store.setting("idempotency") or "{}")
        return OrderedDict((key, (job_id, digest)) for key, (job_id, digest) in kept.items())

    def _free_id(self, name: str) -> str:
        """The name, or the name with a number where jobs of it have ended; Conflict with one that has not.

        A job that was forgotten may have left checkpoints, from which a new one would go on as if they were its own.
        """
        jobs = self.runner.controller.jobs
        job_id, number = name, 1
        while (record := jobs.get(job_id)) is not None or self._left_folders(job_id):
            if record is not None and record.state not in ENDED:
                raise Conflict(
                    f"job '{job_id}' is there and {record.state}; cancel it with 'pollux cancel {job_id}', "
                    "or give the new one another name"
                )
            number += 1
            job_id = f"{name}-{number}"
        return job_id

    def _left_folders(self, job_id: str) -> bool:
        """Whether something of an earlier job is there; who keeps no past (`pollux run --home`) goes on from it."""
        home = self.settings.home
        return self.settings.store != "memory" and any((home / kind / job_id).exists() for kind in _JOB_FOLDERS)

    def _steer(self, job_id: str, event: Callable[[float, JobRecord], Event]) -> Future[JobStatus]:
        def facts(at: float) -> Facts:
            return Facts(event(at, self._record(job_id)))

        return self._ask(facts, lambda: self.job(job_id))

    def _record(self, job_id: str) -> JobRecord:
        """A job as it is now; one that was submitted a moment ago is on no card yet."""
        known = self.runner.controller.jobs.get(job_id)
        return self.board.get(job_id).record if known is None else known

    def begin_cancel(self, job_id: str) -> Future[JobStatus]:
        """End a job for good."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(f"job '{job_id}' has ended already: it is {record.state}")
            return JobCancelled(at, job_id)

        return self._steer(job_id, event)

    def cancel(self, job_id: str) -> JobStatus:
        """End a job for good."""
        return self._wait(self.begin_cancel(job_id))

    def begin_pause(self, job_id: str) -> Future[JobStatus]:
        """Take a job's GPUs away until it is resumed."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(f"job '{job_id}' has ended, it is {record.state}; there is nothing to pause")
            if record.state is JobState.PAUSED:
                raise IllegalTransition(f"job '{job_id}' is paused already; 'pollux resume {job_id}' lets it go on")
            return JobPaused(at, job_id)

        return self._steer(job_id, event)

    def pause(self, job_id: str) -> JobStatus:
        """Take a job's GPUs away until it is resumed."""
        return self._wait(self.begin_pause(job_id))

    def begin_resume(self, job_id: str) -> Future[JobStatus]:
        """Let a paused job run again."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state is not JobState.PAUSED:
                raise IllegalTransition(
                    f"job '{job_id}' is {record.state}, not paused; only a paused job can be resumed"
                )
            return JobResumed(at, job_id)

        return self._steer(job_id, event)

    def resume(self, job_id: str) -> JobStatus:
        """Let a paused job run again."""
        return self._wait(self.begin_resume(job_id))

    def begin_resize(self, job_id: str, min_gpus: int, max_gpus: int) -> Future[JobStatus]:
        """Change how many GPUs a job may hold."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(
                    f"job '{job_id}' has ended, it is {record.state}; its limits cannot change any more"
                )
            limits = replace(record.spec.limits, min_gpus=min_gpus, max_gpus=max_gpus)
            return JobLimitsChanged(at, job_id, limits)

        return self._steer(job_id, event)

    def resize(self, job_id: str, min_gpus: int, max_gpus: int) -> JobStatus:
        """Change how many GPUs a job may hold."""
        return self._wait(self.begin_resize(job_id, min_gpus, max_gpus))

    def begin_report(self, job_id: str, report: Report) -> Future[ReportReply]:
        """Take an agent's report in; it is durable when the reply is there."""

        def facts(at: float) -> Facts:
            record = self._record(job_id)
            check_report(record, report)
            event = fact_of(record, report, at)
            if event is not None and not self.runner.controller.is_news(event):
                event = None
            return Facts(event, (row_of(job_id, at, report),))

        def reply() -> ReportReply:
            most = self.runner.controller.jobs[job_id].local_batch_max
            return ReportReply(self.settings.report_every_seconds, most)

        return self._ask(facts, reply)

    def report(self, job_id: str, report: Report) -> ReportReply:
        """Take an agent's report in."""
        return self._wait(self.begin_report(job_id, report))

    # Queues, and what can be seen

    def begin_set_queue(self, queue: Queue) -> Future[QueueStatus]:
        """Create a queue, or change its weight and quota."""
        if len(queue.name) > 63:
            raise InvalidInput(f"queue name '{queue.name[:80]}' has {len(queue.name)} letters; give at most 63")

        def reply() -> QueueStatus:
            return next(found for found in queues_of(self.runner.controller) if found.name == queue.name)

        return self._ask(lambda at: Facts(QueueChanged(at, queue)), reply)

    def begin_status(self) -> Future[ServiceStatus]:
        """The service about itself."""
        return self._look(self._status)

    def status(self) -> ServiceStatus:
        """The service about itself."""
        return self._wait(self.begin_status())

    def _status(self) -> ServiceStatus:
        controller = self.runner.controller
        states: dict[str, int] = {}
        for record in controller.jobs.values():
            states[str(record.state)] = states.get(str(record.state), 0) + 1
        return ServiceStatus(
            version=__version__, policy=self.policy.name, trigger=self.settings.trigger, backend=self.backend.name,
            started_at=self.started_at, now=self.now(), revision=self.store.revision, nodes=nodes_of(controller),
            queues=queues_of(controller), jobs_by_state=states, last_decision_at=self.runner.last_decision_at,
            decision_seconds=self.runner.decision_seconds, interval_seconds=self.settings.interval_seconds,
            at_stop=self.settings.at_stop,
            warnings=self.backend.warnings(),
        )  # fmt: skip

    def begin_nodes(self) -> Future[tuple[NodeStatus, ...]]:
        """Who holds what on each node."""
        return self._look(lambda: nodes_of(self.runner.controller))

    def begin_queues(self) -> Future[tuple[QueueStatus, ...]]:
        """All queues."""
        return self._look(lambda: queues_of(self.runner.controller))

    @property
    def board(self) -> Board:
        """The cards of all jobs; reading needs no waiting."""
        return self.runner.desk.board

    def job(self, job_id: str) -> JobStatus:
        """One job; UnknownName where it is not there."""
        card, fairness = self.board.get(job_id), self.fairness()
        status = card.status(fairness.now, fairness.of(card))
        leaving = self.leaving_before(job_id)
        return replace(status, detail=leaving) if leaving else status

    def leaving_before(self, job_id: str, running: Sequence[Running] | None = None) -> str:
        """For whom a job that was given GPUs still waits, in words; empty where it does not.

        `running` is what the backend has, for who asks about many jobs at once.
        """
        if self.board.get(job_id).record.state not in (JobState.STARTING, JobState.RESIZING):
            return ""
        board = self.board

        def restarts(other: str) -> bool:
            # One that moves in its living processes waits for others only.
            record = board.get(other).record if other in board else None
            return record is not None and record.state is JobState.RESIZING and not record.moves_live

        return waits_to_leave(job_id, self.backend.running() if running is None else running, restarts)

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs in the order in which they were submitted."""
        fairness = self.fairness()
        return tuple(card.status(fairness.now, fairness.of(card)) for card in self.board.cards())

    def story(self, job_id: str) -> tuple[Line, ...]:
        """What happened to a job, the last hundred lines."""
        self.board.get(job_id)
        return self.runner.desk.story.of(job_id)

    def eta_quality(self, job_id: str | None = None) -> dict[str, Any]:
        """How good the predicted intervals were, of one job or of all."""
        etas = self.runner.desk.etas
        return etas.overall() if job_id is None else etas.quality(job_id)

    def fairness(self) -> Fairness:
        """What tells any job's finish-time fairness as it looks now."""
        return Fairness(self.runner.controller.cluster, self.board.num_active, self.now())

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of a replica's log; a negative offset counts from the end."""
        most = max(self.board.get(job_id).record.largest_gpus, 1)
        if replica >= most:
            raise UnknownName(f"replica of job '{job_id}'", str(replica), map(str, range(min(most, _NAMED_REPLICAS))))
        return self.backend.logs(job_id, replica, offset, limit)

    def series(self, job_id: str, kind: str, since: float, limit: int) -> list[TelemetryRow]:
        """Measurements of a job over time."""
        self.board.get(job_id)
        return self.telemetry.series(job_id, kind, since, limit)

    def history(self) -> Iterator[bytes]:
        """Everything that happened, as lines of the history format."""
        from pollux.store.history import export

        return export(self.store, self.telemetry)

    def note_on(self, request: JobRequest) -> str:
        """What a submitter should know of a job here, and is no reason to refuse it; empty where there is nothing."""
        address = store_of(request)
        notes = (
            self._note_on_grace(request),
            note_on_notice(request.name, self.backend.taken_back_seconds, self.telemetry.latest("report")),
            note_on_store(address) if address else "",
        )
        return "; ".join(note for note in notes if note)

    def _note_on_grace(self, request: JobRequest) -> str:
        notice = self.backend.notice_seconds
        if notice is None or request.grace_seconds <= notice:
            return ""
        return (
            f"grace is {request.grace_seconds:g} s, and nodes here are left {notice:g} s before they go: what it has "
            "not saved by then is lost; give a shorter grace, or start the service with a larger margin_seconds"
        )

    def check(self, request: JobRequest) -> None:
        """Refuse a job whose folder or command is not on this machine, or whose checkpoints would have no place."""
        faults = check_paths(request)
        if faults:
            raise self._refusal(faults[0], is_elsewhere(request))
        folders = folders_of(request, self.settings.home)
        why = self.backend.refuses(folders)
        if why:
            raise self._refusal(why, bool(self.backend.refuses(folders[:1])))
        self.check_store(request)

    def _refusal(self, why: str, lacks_folder: bool) -> InvalidInput:
        """What is sent along lies in the home: it helps where that is the same on all nodes."""
        if lacks_folder and not self.backend.refuses((str(self.settings.home),)):
            return WorkdirMissing(f"{why}; {_SHIP}")
        return InvalidInput(why)

    def check_store(self, request: JobRequest) -> None:
        """Refuse a job whose checkpoints are to go to a store that cannot be written to; takes seconds."""
        address = store_of(request)
        if address is not None:
            require_store(address, request.env)
