"""The virtual clock: runs the controller and a policy with simulated jobs.

Jobs progress between two moments by themselves; the loop only knows arrivals, epoch ends and decisions.
With the trigger `rounds`, arrivals and completions are noticed at the round's end, as in the published simulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pollux.controller import (
    Command,
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    JobFinished,
    JobReported,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    ResizeJob,
    StartJob,
    StopJob,
    require,
)
from pollux.core import NOWHERE, Cluster, GoodputFunction, InvalidInput, JobLimits, Node, Policy
from pollux.sim.applications.application import Application
from pollux.sim.applications.modelled import Terms
from pollux.sim.simulation.disturbances import Disturbances, JobDisturbance, node_failures
from pollux.sim.simulation.jobs import FixedBatch, LearnedBatch, Oracle, SimulatedJob
from pollux.sim.simulation.resize_cost import AUTO, DEFAULT_RESIZE_SECONDS, Pauses
from pollux.sim.workloads.workload import Workload, WorkloadJob, check_applications

__all__ = ["JobOutcome", "Record", "RunOutcome", "SimulationSettings", "simulate"]

Record = Callable[[Event, Sequence[Command]], None]
"""Called with every fact that the controller applies, and the commands that it returns."""

_MOST_GPUS = 1_000_000
_DAY_SECONDS = 86_400.0

# If nothing runs for a simulated day while jobs wait, nothing will run later either.
_PATIENCE_SECONDS = _DAY_SECONDS

_OFFERED = frozenset({"goodput", "oracle", "remaining", "prior", "kind", "group", "deadline"})


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The world: cluster, clock, costs. The defaults are the published ones.

    `interference` is the share of speed that a distributed job loses when another distributed job uses one of
    its nodes. `max_gpus_per_job` bounds adaptive jobs. `max_hours` ends a run that gets nowhere. `resize_seconds` is
    how long a job pauses when its GPUs change; `auto`: by the model of `resize_cost`.
    """

    num_nodes: int = 16
    gpus_per_node: int = 4
    trigger: Literal["rounds", "events"] = "rounds"
    interval_seconds: float = 60.0
    resize_seconds: float | Literal["auto"] = DEFAULT_RESIZE_SECONDS
    interference: float = 0.0
    max_gpus_per_job: int = 64
    max_hours: float = 10_000.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise InvalidInput(f"nodes is {self.num_nodes}; give at least 1")
        if self.gpus_per_node < 1:
            raise InvalidInput(f"gpus-per-node is {self.gpus_per_node}; give at least 1")
        if self.num_gpus > _MOST_GPUS:
            raise InvalidInput(
                f"nodes x gpus-per-node is {self.num_nodes} x {self.gpus_per_node}; "
                f"give at most {_MOST_GPUS:,} GPUs in all"
            )
        if not 1.0 <= self.interval_seconds <= _DAY_SECONDS:
            raise InvalidInput(f"interval is {self.interval_seconds}; give 1 to {_DAY_SECONDS:,.0f} seconds")
        if self.resize_seconds != AUTO and not 0.0 <= self.resize_seconds <= _DAY_SECONDS:
            raise InvalidInput(
                f"resize-seconds is {self.resize_seconds}; give 0 to {_DAY_SECONDS:,.0f} seconds, or 'auto'"
            )
        if self.max_gpus_per_job < 1:
            raise InvalidInput(f"max-gpus-per-job is {self.max_gpus_per_job}; give at least 1")
        if not 0 <= self.interference < 1:
            raise InvalidInput(f"interference is {self.interference}; give a share of speed from 0 to below 1")

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The history of one job, in seconds of virtual time."""

    name: str
    application: str
    submitted: float
    started: float
    finished: float
    restarts: int
    gpu_seconds: float
    samples: tuple[tuple[float, int, int, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The results of one run; `decision_seconds` are CPU seconds of the policy and its check."""

    workload: str
    policy: str
    jobs: tuple[JobOutcome, ...]
    decision_seconds: tuple[float, ...] = field(repr=False)
    cpu_seconds: float


class _Run:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        applications: Mapping[str, Application],
        settings: SimulationSettings,
        progress: Callable[[int, int], None] | None,
        record: Record | None = None,
        only_news: bool = False,
        disturbances: Disturbances | None = None,
    ) -> None:
        require(policy, _OFFERED)
        check_applications(workload, applications, settings.num_gpus)
        self.workload, self.policy, self.applications, self.settings = workload, policy, applications, settings
        self.progress, self.record, self.only_news = progress, record, only_news
        self.controller = Controller(
            Cluster.uniform(settings.num_nodes, settings.gpus_per_node),
            ControllerSettings(settings.trigger, settings.interval_seconds, seed=settings.seed),
        )
        self.disturbances = disturbances
        self.failures = node_failures(disturbances or Disturbances(), settings.seed, settings.num_nodes)
        self.next_failure = next(self.failures, None)
        self.repairs: list[tuple[float, Node]] = []
        self.rounds = settings.trigger == "rounds"
        self.pauses = Pauses(settings.resize_seconds)
        self.arrivals = list(reversed(workload.jobs))
        self.jobs: dict[str, SimulatedJob] = {}
        self.unfinished: dict[str, SimulatedJob] = {}
        self.announced: set[tuple[str, int]] = set()
        self.reported: dict[str, object] = {}
        self.wake: dict[str, float] = {}
        self.slowdowns: dict[str, float] = {}
        self.decision_seconds: list[float] = []
        self.idle_since = math.inf

    def run(self) -> RunOutcome:
        started = time.process_time()
        self.controller.start(0.0)
        while self.arrivals or self.unfinished:
            now = self._next_moment()
            if now > self.settings.max_hours * 3600:
                waiting = next(iter(self.unfinished), "?")
                raise InvalidInput(
                    f"workload '{self.workload.name}' under '{self.policy.name}': job '{waiting}' is not done after "
                    f"{self.settings.max_hours:g} simulated hours; give the cluster more GPUs or the job less to do"
                )
            if now > self.idle_since + _PATIENCE_SECONDS and not self.arrivals:
                raise self._stuck()
            self._advance(now)
            self._break_and_repair(now)
            self._arrive(now)
            due = self.controller.next_decision_at
            if due is not None and due <= now:
                self._decide(now)
        return self._outcome(time.process_time() - started)

    def _next_moment(self) -> float:
        due = self.controller.next_decision_at
        moments = [] if due is None else [due]
        if not self.rounds:
            moments += [self.arrivals[-1].time] if self.arrivals else []
            moments += self.wake.values()
            moments += [at for at, _ in self.repairs[:1]]
            moments += [] if self.next_failure is None else [self.next_failure[0]]
        if not moments:
            raise self._stuck()
        return min(moments)

    def _break_and_repair(self, now: float) -> None:
        """Add nodes repaired by now; remove nodes that fail by now, with what runs there."""
        while self.repairs and self.repairs[0][0] <= now:
            self._apply(NodeAdded(now, self.repairs.pop(0)[1]))
        while self.next_failure is not None and self.next_failure[0] <= now:
            assert self.disturbances is not None
            node = self.controller.cluster.by_id.get(f"node-{self.next_failure[1]}")
            self.next_failure = next(self.failures, None)
            if node is None:
                continue
            self._advance_jobs(self.unfinished, now)
            for command in self._apply(NodeRemoved(now, node.id)):
                if isinstance(command, StopJob):
                    self.jobs[command.job_id].lose(self.disturbances.checkpoint_seconds)
                self._execute(command, now)
            self.repairs.append((now + self.disturbances.repair_seconds, node))

    def _stuck(self) -> InvalidInput:
        return InvalidInput(
            f"policy '{self.policy.name}' leaves {len(self.unfinished)} jobs of workload '{self.workload.name}' "
            "waiting for ever; give the cluster more GPUs, or choose another policy"
        )

    def _advance(self, now: float) -> None:
        """Bring jobs to `now`; in rounds all of them, else those for which something is due."""
        if self.rounds:
            self._advance_jobs(self.unfinished, now)
            return
        due = {job_id: job for job_id, job in self.unfinished.items() if self.wake.get(job_id, math.inf) <= now}
        before = len(self.unfinished)
        self._advance_jobs(due, now)
        if self.settings.interference and len(self.unfinished) < before:
            # Jobs that shared a node with a job that ended were slowed down until now, and are not any more.
            self._advance_jobs(self.unfinished, now)
            self._interfere()
            for job_id, job in self.unfinished.items():
                self._set_wake(job_id, job)

    def _advance_jobs(self, jobs: Mapping[str, SimulatedJob], now: float) -> None:
        for job_id, job in list(jobs.items()):
            self._advance_job(job_id, job, now)

    def _advance_job(self, job_id: str, job: SimulatedJob, now: float) -> None:
        job.advance(now, self.slowdowns.get(job_id, 0.0))
        record = self.controller.jobs[job_id]
        if job.placement and not job.standstill_seconds and (job_id, record.generation) not in self.announced:
            self.announced.add((job_id, record.generation))
            self._apply(JobRunning(job.clock, job_id, record.generation))
        if job.completed_at is not None:
            self._apply(JobFinished(job.completed_at, job_id))
            del self.unfinished[job_id]
            self.wake.pop(job_id, None)
            if self.progress is not None:
                self.progress(len(self.jobs) - len(self.unfinished), len(self.workload.jobs))
            return
        model = job.batching.model
        if model is not None and job.placement:
            self._report(job_id, job, model, now)
        self._set_wake(job_id, job)

    def _report(self, job_id: str, job: SimulatedJob, model: GoodputFunction, now: float) -> None:
        remaining: float | None = job.remaining_samples
        progress: float | None = job.useful_samples
        if job.disturbance is not None:
            remaining = job.disturbance.remaining(job.remaining_samples, job.remaining_samples + job.useful_samples)
            progress = None if remaining is None else progress
        if self.only_news:
            event = JobReported(now, job_id, model, remaining, local_batch=job.batch.local_batch if job.batch else None)
            if self.controller.is_news(event):
                self._apply(event)
            return
        news = None if model is self.reported.get(job_id) else model
        self.reported[job_id] = model
        local_batch = job.batching.measured_local_batch(job.placement)
        self._apply(JobReported(now, job_id, news, remaining, local_batch=local_batch, progress=progress))

    def _apply(self, event: Event) -> list[Command]:
        commands = self.controller.apply(event)
        if self.record is not None:
            self.record(event, commands)
        return commands

    def _set_wake(self, job_id: str, job: SimulatedJob) -> None:
        if self.rounds:
            return
        at = job.next_news_at(self.slowdowns.get(job_id, 0.0))
        if at is None:
            self.wake.pop(job_id, None)
        else:
            self.wake[job_id] = at

    def _arrive(self, now: float) -> None:
        while self.arrivals and self.arrivals[-1].time <= now:
            request = self.arrivals.pop()
            job, spec = self._new_job(request)
            terms = _terms(self.applications[request.application])
            if terms is not None and terms.queue is not None and terms.queue.name not in self.controller.queues:
                self._apply(QueueChanged(request.time, terms.queue))
            self.jobs[request.name] = self.unfinished[request.name] = job
            self._apply(JobSubmitted(request.time, spec))

    def _new_job(self, request: WorkloadJob) -> tuple[SimulatedJob, JobSpec]:
        settings, application = self.settings, self.applications[request.application]
        limits = application.limits
        job = SimulatedJob(
            request.name,
            application,
            FixedBatch(application, request.batch_size),
            whole_seconds=self.rounds,
            clock=request.time,
        )
        if self.disturbances is not None:
            job.disturbance = JobDisturbance(self.disturbances, settings.seed, request.name)
        if self.policy.batch == "fixed":
            most = max(request.batch_size // limits.local_min, request.num_gpus)
            if application.fixed is not None:
                most = max(application.fixed.num_gpus, request.num_gpus)
            oracle = Oracle(job, request.batch_size, settings.gpus_per_node)
        else:
            fixed, oracle = application.fixed, None
            most = fixed.num_gpus if fixed else min(settings.max_gpus_per_job, limits.maximum // limits.local_min)
            job.batching = LearnedBatch(application, fixed.batch_size if fixed else None)
        terms = _terms(application) or Terms()
        spec = JobSpec(
            request.name,
            self._limits(application, min(most, settings.num_gpus)),
            requested_gpus=request.num_gpus,
            weight=terms.weight,
            queue="" if terms.queue is None else terms.queue.name,
            resize_cost_seconds=self.pauses.expected(application),
            oracle=oracle,
            kind=application.name,
            group=request.group,
            deadline=request.deadline,
        )
        return job, spec

    def _limits(self, application: Application, most: int) -> JobLimits:
        """One to `most` GPUs on measured nodes, within the limits of its user, if they are known."""
        terms, nodes = _terms(application), application.max_nodes
        if terms is None:
            return JobLimits(1, most, max_nodes=nodes)
        least = terms.limits.min_gpus
        nodes = nodes if terms.limits.max_nodes is None else min(nodes, terms.limits.max_nodes)
        return replace(terms.limits, max_gpus=max(min(most, terms.limits.max_gpus), least), max_nodes=nodes)

    def _decide(self, now: float) -> None:
        if not self.rounds:
            self._advance_jobs(self.unfinished, now)
        began = time.process_time()
        snapshot = self.controller.snapshot(now)
        decision = self.policy.allocate(snapshot)
        commands = self._apply(DecisionMade(now, snapshot.revision, decision))
        self.decision_seconds.append(time.process_time() - began)
        for command in commands:
            self._execute(command, now)
        self._interfere()
        if any(job.placement for job in self.unfinished.values()):
            self.idle_since = math.inf
        else:
            self.idle_since = min(self.idle_since, now)
        if not self.rounds:
            for job_id, job in self.unfinished.items():
                self._set_wake(job_id, job)

    def _execute(self, command: Command, now: float) -> None:
        if isinstance(command, StartJob | ResizeJob | StopJob):
            job = self.jobs[command.job_id]
            job.clock = now
            if isinstance(command, StopJob):
                job.place(NOWHERE, 0.0)
            elif isinstance(command, ResizeJob):
                job.place(command.placement, self._pause(job, self.pauses.change(job.application)))
            else:
                first = self.controller.jobs[command.job_id].num_starts == 1
                job.place(command.placement, self._pause(job, self.pauses.start(job.application, first)))

    def _pause(self, job: SimulatedJob, seconds: float) -> float:
        return seconds if job.disturbance is None else job.disturbance.pause(seconds)

    def _interfere(self) -> None:
        """The jobs that share a node's network with another distributed job."""
        if not self.settings.interference:
            return
        users: dict[str, int] = {}
        spread = {job_id: job.placement for job_id, job in self.unfinished.items() if job.placement.is_distributed}
        for placement in spread.values():
            for node, _ in placement.shares:
                users[node] = users.get(node, 0) + 1
        self.slowdowns = {
            job_id: self.settings.interference
            for job_id, placement in spread.items()
            if any(users[node] > 1 for node, _ in placement.shares)
        }

    def _outcome(self, cpu_seconds: float) -> RunOutcome:
        outcomes = []
        for request in self.workload.jobs:
            job, record = self.jobs[request.name], self.controller.jobs[request.name]
            assert record.started_at is not None, request.name
            assert record.ended_at is not None, request.name
            samples = tuple((s.at, s.num_gpus, s.total_batch, s.efficiency) for s in job.samples)
            outcomes.append(
                JobOutcome(
                    request.name,
                    request.application,
                    request.time,
                    record.started_at,
                    record.ended_at,
                    record.num_restarts,
                    record.attained_gpu_seconds,
                    samples,
                )
            )
        return RunOutcome(
            self.workload.name, self.policy.name, tuple(outcomes), tuple(self.decision_seconds), cpu_seconds
        )


def _terms(application: Application) -> Terms | None:
    """The user's limits of a recorded job; other applications have none."""
    found = getattr(application, "terms", None)
    return found if isinstance(found, Terms) else None


def simulate(
    workload: Workload,
    policy: Policy,
    applications: Mapping[str, Application],
    settings: SimulationSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    record: Record | None = None,
    only_news: bool = False,
    disturbances: Disturbances | None = None,
) -> RunOutcome:
    """Run one workload under one policy; `progress(done, total)` is called as jobs end.

    `record` is called with every fact and its commands. With `only_news`, reports that a service would keep
    as telemetry (`Controller.is_news`) do not reach the controller. `disturbances` are what goes wrong; None: nothing.
    """
    world = settings or SimulationSettings()
    return _Run(workload, policy, applications, world, progress, record, only_news, disturbances).run()
