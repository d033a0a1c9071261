"""The service without HTTP: all its operations.

All methods may be called from any thread. Those that change something, or read in the engine's thread, return a future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from pollux.backends.protocol import Backend, LogChunk, Running
from pollux.controller import (
    ENDED,
    JobCancelled,
    JobLimitsChanged,
    JobPaused,
    JobRecord,
    JobResumed,
    JobState,
    JobSubmitted,
    NodeSetAside,
    NodeTakenBack,
    QueueChanged,
)
from pollux.controller.messages.events import Event, JobSpec
from pollux.controller.messages.job_spec import spec_from
from pollux.core import Cluster, Policy, Queue
from pollux.core.errors import IllegalTransition, InvalidInput, UnknownName, Unreachable
from pollux.core.version import __version__
from pollux.service.auth.tokens import Tokens
from pollux.service.clocks.job_rates import JobRates
from pollux.service.engine.admission import Admission
from pollux.service.engine.decision_thread import STOPPING, pass_on
from pollux.service.engine.executor import waits_to_leave
from pollux.service.engine.forecast import Forecast
from pollux.service.engine.job_ids import JobIds
from pollux.service.engine.loop import EngineLoop
from pollux.service.engine.pipeline import EventPipeline, LastDecision
from pollux.service.engine.report_events import check_report, event_of_report, row_of
from pollux.service.engine.requests import Effects
from pollux.service.settings import AtStop, ServiceSettings
from pollux.service.settings.clock import Clock, SystemClock
from pollux.service.views.fairness import Fairness
from pollux.service.views.job_events import JobEvent
from pollux.service.views.projector import Projector, nodes_of, queues_of
from pollux.service.views.refusals import ApiRefusals
from pollux.store.protocol import Store, Telemetry, TelemetryRow
from pollux.wire.job import JobRequest
from pollux.wire.report import Report, ReportReply
from pollux.wire.status import JobStatus, NodeStatus, Plan, QueueStatus, ServiceStatus

__all__ = ["Engine"]

_NAMED_REPLICAS = 10


class Engine:
    """Submits, lists and controls jobs. Errors are `PolluxError`s; a refusal changes nothing.

    `loop` is its thread, `views` what people see; `admission` checks requests before they are submitted.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        store: Store,
        telemetry: Telemetry,
        settings: ServiceSettings,
        clock: Clock | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.store = store
        self.telemetry = telemetry
        self.settings = settings
        self.tokens = tokens or Tokens.random()
        self.refusals = ApiRefusals()
        self._fact_rates = JobRates(burst=20, refill_seconds=5.0)
        self.admission = Admission(backend, telemetry, settings)
        self._clock = clock or SystemClock()
        self._job_ids = JobIds(store, settings)
        self.loop = EngineLoop(policy, backend, store, telemetry, settings, self._clock, self.tokens)
        self.started_at = self._clock.now()

    # Start and end

    def start(self) -> None:
        """Connect the backend, reconcile it with the log, and start the thread."""
        self.loop.start()

    def stop(self, jobs: AtStop | None = None) -> None:
        """Stop the engine. Running jobs stop with their grace and go on at the next start, or are kept running."""
        self.loop.stop(jobs)

    @property
    def stopping(self) -> bool:
        """Whether it is stopping: it answers requests, but accepts no new jobs and starts nothing."""
        return self.loop.stopping

    def now(self) -> float:
        """The service's clock."""
        return self._clock.now()

    @property
    def pipeline(self) -> EventPipeline:
        """The pipeline of events; its state belongs to the engine's thread."""
        return self.loop.pipeline

    @property
    def views(self) -> Projector:
        """The views of jobs, which are read without waiting."""
        return self.pipeline.views

    @property
    def cluster(self) -> Cluster:
        """The nodes as they are now."""
        return self.pipeline.controller.cluster

    @property
    def set_aside(self) -> Mapping[str, str]:
        """Nodes on which policies place nothing new, and why."""
        return self.pipeline.controller.set_aside

    @property
    def last_decision(self) -> LastDecision:
        """When the last decision was made, and how long it took."""
        return self.pipeline.last_decision

    # Jobs

    def submit(self, request: JobRequest, key: str | None = None) -> Future[tuple[JobStatus, Plan]]:
        """Submit a job. The same idempotency `key` with the same request gives the same job again.

        Before the answer the store has the key (`JobIds.of_submission`) and the fact (`EventPipeline.process`).
        """
        answer: Future[tuple[JobStatus, Plan]] = Future()
        accepted: list[str] = []

        def effects(at: float) -> Effects:
            self._refuse_if_stopping()
            job_id, known = self._job_ids.of_submission(request, key, self.pipeline.controller.jobs)
            accepted.append(job_id)
            return Effects() if known else Effects(JobSubmitted(at, self._spec(request, job_id)))

        def reply() -> tuple[JobStatus, Forecast]:
            job_id = accepted[0]
            return self.job(job_id), Forecast.of(self.pipeline.controller, job_id, self.pipeline.now())

        self._then_plan(self.loop.request(effects, reply), answer)
        return answer

    def plan(self, request: JobRequest) -> Future[Plan]:
        """The plan of a job, without submitting it."""
        answer: Future[tuple[None, Plan]] = Future()

        def reply() -> tuple[None, Forecast]:
            self._refuse_if_stopping()
            controller = self.pipeline.controller
            job_id = self._job_ids.free_id(request.name, controller.jobs)
            return None, Forecast.of_new(controller, self._spec(request, job_id), self.pipeline.now())

        self._then_plan(self.loop.read(reply), answer)
        plan: Future[Plan] = Future()
        answer.add_done_callback(lambda done: pass_on(done, plan, lambda both: both[1]))
        return plan

    def _refuse_if_stopping(self) -> None:
        if self.stopping:
            raise Unreachable(STOPPING)

    def _spec(self, request: JobRequest, job_id: str) -> JobSpec:
        cost = self.settings.resize_seconds
        if cost is None:
            cost = self.backend.live_seconds if request.allows_live else self.backend.restart_seconds
        return spec_from(request, job_id, cost, max(self.cluster.num_gpus, 1))

    def _then_plan(self, found: Future[Any], answer: Future[Any]) -> None:
        """Let the policy's thread make the plan, which takes as long as a decision."""

        def plan(done: Future[Any]) -> None:
            if done.exception() is not None:
                pass_on(done, answer, lambda both: both)
                return
            status, forecast = done.result()
            planned = self.loop.plan(forecast)
            planned.add_done_callback(lambda plan: pass_on(plan, answer, lambda found: (status, found)))

        found.add_done_callback(plan)

    def cancel(self, job_id: str) -> Future[JobStatus]:
        """End a job for good."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(f"job '{job_id}' has ended already: it is {record.state}")
            return JobCancelled(at, job_id)

        return self._change(job_id, event)

    def pause(self, job_id: str) -> Future[JobStatus]:
        """Take a job's GPUs away until it is resumed."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(f"job '{job_id}' has ended, it is {record.state}; there is nothing to pause")
            if record.state is JobState.PAUSED:
                raise IllegalTransition(f"job '{job_id}' is paused already; 'pollux resume {job_id}' lets it go on")
            return JobPaused(at, job_id)

        return self._change(job_id, event)

    def resume(self, job_id: str) -> Future[JobStatus]:
        """Let a paused job run again."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state is not JobState.PAUSED:
                raise IllegalTransition(
                    f"job '{job_id}' is {record.state}, not paused; only a paused job can be resumed"
                )
            return JobResumed(at, job_id)

        return self._change(job_id, event)

    def resize(self, job_id: str, min_gpus: int, max_gpus: int) -> Future[JobStatus]:
        """Change how many GPUs a job may hold."""

        def event(at: float, record: JobRecord) -> Event:
            if record.state in ENDED:
                raise IllegalTransition(
                    f"job '{job_id}' has ended, it is {record.state}; its limits cannot change any more"
                )
            limits = replace(record.spec.limits, min_gpus=min_gpus, max_gpus=max_gpus)
            return JobLimitsChanged(at, job_id, limits)

        return self._change(job_id, event)

    def _change(self, job_id: str, event: Callable[[float, JobRecord], Event]) -> Future[JobStatus]:
        def effects(at: float) -> Effects:
            return Effects(event(at, self._record(job_id)))

        return self.loop.request(effects, lambda: self.job(job_id))

    def _record(self, job_id: str) -> JobRecord:
        """A job as it is now; a job that was just submitted is not on the board yet."""
        known = self.pipeline.controller.jobs.get(job_id)
        return self.views.board.get(job_id).record if known is None else known

    def report(self, job_id: str, report: Report) -> Future[ReportReply]:
        """Process an agent's report, which is durable once it is answered."""

        def effects(at: float) -> Effects:
            record = self._record(job_id)
            check_report(record, report)
            event = event_of_report(record, report, at)
            if event is not None and not self.pipeline.controller.is_news(event):
                event = None
            # What is news now is news in a later report, too.
            if event is not None and not self._fact_rates.take(job_id, at):
                event = None
            return Effects(event, (row_of(job_id, at, report),))

        def reply() -> ReportReply:
            most = self.pipeline.controller.jobs[job_id].local_batch_max
            return ReportReply(self.settings.report_every_seconds, most)

        return self.loop.request(effects, reply)

    # Queues and nodes

    def set_queue(self, queue: Queue) -> Future[QueueStatus]:
        """Create a queue, or change its weight and quota."""
        if len(queue.name) > 63:
            raise InvalidInput(f"queue name '{queue.name[:80]}' has {len(queue.name)} letters; give at most 63")

        def reply() -> QueueStatus:
            return next(found for found in queues_of(self.pipeline.controller) if found.name == queue.name)

        return self.loop.request(lambda at: Effects(QueueChanged(at, queue)), reply)

    def has_queue(self, name: str) -> bool:
        """Whether a queue was set up."""
        return name in self.pipeline.controller.queues

    def queues(self) -> Future[tuple[QueueStatus, ...]]:
        """All queues."""
        return self.loop.read(lambda: queues_of(self.pipeline.controller))

    def nodes(self) -> Future[tuple[NodeStatus, ...]]:
        """All nodes, with the GPUs that jobs hold on them."""
        return self.loop.read(lambda: nodes_of(self.pipeline.controller))

    def set_node_aside(self, node_id: str, why: str) -> Future[NodeStatus]:
        """Place nothing new on a node; what runs there stays."""
        return self._change_node(node_id, lambda at: NodeSetAside(at, node_id, why or "by an operator"))

    def take_node_back(self, node_id: str) -> Future[NodeStatus]:
        """Use a set-aside node again."""
        return self._change_node(node_id, lambda at: NodeTakenBack(at, node_id))

    def _change_node(self, node_id: str, event: Callable[[float], Event]) -> Future[NodeStatus]:
        def reply() -> NodeStatus:
            # A node that is gone can be taken back as well, for when it returns.
            known = nodes_of(self.pipeline.controller)
            return next((node for node in known if node.id == node_id), NodeStatus(node_id, 0, "", 0))

        return self.loop.request(lambda at: Effects(event(at)), reply)

    def status(self) -> Future[ServiceStatus]:
        """The status of the service."""
        return self.loop.read(self._status)

    def _status(self) -> ServiceStatus:
        controller = self.pipeline.controller
        states: dict[str, int] = {}
        for record in controller.jobs.values():
            states[str(record.state)] = states.get(str(record.state), 0) + 1
        return ServiceStatus(
            version=__version__, policy=self.policy.name, trigger=self.settings.trigger, backend=self.backend.name,
            started_at=self.started_at, now=self.now(), revision=self.store.revision, nodes=nodes_of(controller),
            queues=queues_of(controller), jobs_by_state=states, last_decision_at=self.last_decision.at,
            decision_seconds=self.last_decision.seconds, interval_seconds=self.settings.interval_seconds,
            at_stop=self.settings.at_stop, warnings=(*self.backend.warnings(), *self._set_aside_lines()),
        )  # fmt: skip

    def _set_aside_lines(self) -> tuple[str, ...]:
        return tuple(
            f"node '{node_id}' is set aside: {why}; 'pollux nodes take-back {node_id}' has it used again"
            for node_id, why in self.pipeline.controller.set_aside.items()
        )

    # What can be seen

    def job(self, job_id: str) -> JobStatus:
        """One job; UnknownName if there is none."""
        entry, fairness = self.views.board.get(job_id), self.fairness()
        status = entry.status(fairness.now, fairness.of(entry))
        leaving = self.leaving_before(job_id)
        return replace(status, detail=leaving) if leaving else status

    def leaving_before(self, job_id: str, running: Sequence[Running] | None = None) -> str:
        """Which jobs must leave before a job can start on its GPUs, as a sentence; empty if it does not wait.

        `running` is what the backend has, for callers that ask about many jobs at once.
        """
        board = self.views.board
        if board.get(job_id).record.state not in (JobState.STARTING, JobState.RESIZING):
            return ""

        def restarts(other: str) -> bool:
            # A job that is resized live does not leave its GPUs.
            record = board.get(other).record if other in board else None
            return record is not None and record.state is JobState.RESIZING and not record.moves_live

        return waits_to_leave(job_id, self.backend.running() if running is None else running, restarts)

    def jobs(self) -> tuple[JobStatus, ...]:
        """All jobs in order of submission."""
        fairness = self.fairness()
        return tuple(entry.status(fairness.now, fairness.of(entry)) for entry in self.views.board.entries())

    def events_of(self, job_id: str) -> tuple[JobEvent, ...]:
        """The last hundred events of a job."""
        self.views.board.get(job_id)
        return self.views.job_events.of(job_id)

    def fairness(self) -> Fairness:
        """The present inputs of finish-time fairness other than the job."""
        return Fairness(self.cluster, self.views.board.num_active, self.now())

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        """A piece of a replica's log; a negative offset counts from the end."""
        most = max(self.views.board.get(job_id).record.largest_gpus, 1)
        if replica >= most:
            raise UnknownName(f"replica of job '{job_id}'", str(replica), map(str, range(min(most, _NAMED_REPLICAS))))
        return self.backend.logs(job_id, replica, offset, limit)

    def series(self, job_id: str, kind: str, since: float, limit: int) -> list[TelemetryRow]:
        """Measurements of a job over time."""
        self.views.board.get(job_id)
        return self.telemetry.series(job_id, kind, since, limit)

    def history(self) -> Iterator[bytes]:
        """The whole history, as lines of a history file."""
        from pollux.store.history import export

        return export(self.store, self.telemetry)
