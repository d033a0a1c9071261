"""The simulator and the service on the same workload: the same commands at the same times, from the same facts.

One side is `simulate`. On the other jobs come over HTTP, starts and ends through a backend's stream and reports over
HTTP, into an engine with a SQLite store that is restarted in mid-run; the jobs there are `SimulatedJob`s of their own,
which move only where the backend is told to put them. Where the two sides mean to differ, and what is done about it:

- The simulator tells its controller every report, the service only news: here it is asked for `only_news` too.
- In the simulator every job reports just before a decision, and all that happens at one moment comes before the
  decision of that moment. So the service may not begin to think until everything of the moment has been sent.
- By rounds, the simulator notices an end at the round's end; the service hears of it when it happens.
- The service learns of its nodes at the start and decides over nobody then; the first job comes a gap later.
- A restart costs the policy's memory: the simulator's policy loses it too.
- A simulated job's end can be one rounding before the moment that was foreseen for it; a clock does not go back, so it
  ends at that moment. Commands have the moment's time on both sides.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pollux import policies
from pollux.agent.reporting.reporter import model_report
from pollux.backends.protocol import Launch, ReplicasEnded
from pollux.controller import (
    Command,
    Decide,
    DecisionMade,
    Event,
    GenerationEnded,
    JobFinished,
    JobReported,
    JobRunning,
    JobSubmitted,
    NodeAdded,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.core import NOWHERE, Cluster, Decision, Placement, Policy, Snapshot
from pollux.goodput import BatchLimits, GoodputModel, PublishedThroughput
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.service.engine.executor import Executor
from pollux.sim.applications.application import Application
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.simulation.jobs import FixedBatch, LearnedBatch, SimulatedJob
from pollux.sim.simulation.simulation import RunOutcome, SimulationSettings, simulate
from pollux.sim.workloads.workload import Workload, WorkloadJob
from pollux.store import open_store, open_telemetry
from pollux.testing.servers.service import FakeBackend, ManualClock
from pollux.wire.codec import encode
from pollux.wire.job import JobRequest as Submission
from pollux.wire.jobfile import job_to_mapping
from pollux.wire.report import Report

RESIZE_SECONDS = 30.0
NUM_JOBS = 10


# Batches start at a power of two, so that work counted in samples is the same number whoever multiplies.
_SMALL, _LARGE, _LARGEST = BatchLimits(64, 128, 64, 256), BatchLimits(64, 1024, 16, 256), BatchLimits(64, 2048, 8, 256)
_QUICK = PublishedThroughput(0.06, 0.002, 0.05, 0.004, 0.02, 0.002, 1.6)
_USUAL = PublishedThroughput(0.05, 0.004, 0.09, 0.006, 0.02, 0.002, 2.0)
_HEAVY = PublishedThroughput(0.2, 0.006, 0.06, 0.002, 0.03, 0.001, 1.3)
_DECAY = NoiseSchedule(300.0, 20000.0, (0.5,), 3.0)
APPLICATIONS: dict[str, Application] = {
    "quick": ModelledApplication("quick", _QUICK, NoiseSchedule(100.0, 900.0), _SMALL, 5, 90.0),
    "usual": ModelledApplication("usual", _USUAL, NoiseSchedule(60.0, 4000.0), _LARGE, 5, 500.0),
    "heavy": ModelledApplication("heavy", _HEAVY, _DECAY, _LARGEST, 5, 900.0),
}


def make_workload(seed: int, num_gpus: int, adaptive: bool) -> Workload:
    """Jobs that ask for all the GPUs that their batch can use: so much a job file can say too."""
    random_ = random.Random(seed)
    jobs: list[WorkloadJob] = []
    at = 5.0
    for number in range(NUM_JOBS):
        kind = random_.choice(["quick", "quick", "usual", "usual", "heavy"])
        limits = APPLICATIONS[kind].limits
        batch = limits.maximum if adaptive else random_.choice([limits.initial, 2 * limits.initial])
        claims: dict[str, Any] = {"group": "search", "deadline": at + 9000.0} if number % 3 == 0 else {}
        gpus = min(batch // limits.local_min, num_gpus)
        jobs.append(WorkloadJob(f"{kind}-{number}", at, kind, gpus, batch, **claims))
        # Some come while the gap after the decision on the last one is not over.
        at += random_.choice([random_.uniform(0.2, 0.9), random_.expovariate(1 / 60.0)])
    return Workload(f"twin-{seed}", tuple(jobs))


@dataclass
class Log:
    """What one side did: commands as they were given, with their times; and the facts that they came from."""

    commands: list[tuple[float, Command]] = field(default_factory=list)
    facts: list[Event] = field(default_factory=list)

    def take(self, at: float, commands: Iterable[Command]) -> None:
        self.commands += [(at, command) for command in commands if not isinstance(command, Decide)]

    def decisions(self) -> list[float]:
        return [fact.at for fact in self.facts if isinstance(fact, DecisionMade)]

    def story(self, job_id: str) -> list[tuple[Any, ...]]:
        return [told for fact in self.facts if (told := _told(fact, job_id)) is not None]


def _told(fact: Event, job_id: str) -> tuple[Any, ...] | None:
    """What both sides must know alike of a job's facts; starts and ends reach them at different times."""
    if isinstance(fact, JobSubmitted) and fact.spec.id == job_id:
        spec = fact.spec
        limits = replace(spec.limits, max_nodes=None)
        claims = spec.group, spec.deadline
        return "submitted", fact.at, limits, spec.requested_gpus, spec.weight, spec.resize_cost_seconds, claims
    if getattr(fact, "job_id", "") != job_id:
        return None
    if isinstance(fact, JobRunning):
        return "running", fact.generation
    if isinstance(fact, JobReported):
        return "reported", fact.at, fact.remaining, fact.local_batch, fact.goodput
    return ("over", fact.outcome) if isinstance(fact, JobFinished | GenerationEnded) else None


class Forgetful:
    """A policy that loses its memory with the first decision at or after each of `restarts`."""

    def __init__(self, policy: Policy, restarts: Iterable[float]) -> None:
        self.policy, self.restarts = policy, sorted(restarts)
        self.name, self.needs, self.batch = policy.name, policy.needs, policy.batch

    def allocate(self, snapshot: Snapshot) -> Decision:
        while self.restarts and self.restarts[0] <= snapshot.now:
            self.restarts.pop(0)
            snapshot = replace(snapshot, memory=None)
        return self.policy.allocate(snapshot)


class TwinBackend(FakeBackend):
    """Keeps when it was told what, for whoever moves the jobs."""

    def __init__(self, cluster: Cluster, clock: ManualClock) -> None:
        super().__init__(cluster.nodes, clock)
        self.clock = clock
        self.launched: list[tuple[float, str, int, Placement]] = []
        self.orders: list[tuple[str, int, Placement]] = []

    def submit(self, launch: Launch) -> None:
        super().submit(launch)
        self._note(launch)

    def resize(self, launch: Launch) -> None:
        super().resize(launch)
        self._note(launch)

    def _note(self, launch: Launch) -> None:
        self.launched.append((self.clock.now(), launch.job_id, launch.generation, launch.placement))
        self.orders.append((launch.job_id, launch.generation, launch.placement))

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        super().stop(job_id, generation, grace_seconds)
        self.orders.append((job_id, generation, NOWHERE))

    def left(self, job_id: str, generation: int) -> None:
        """Replicas that were told to stop are gone; by then others may be there."""
        if any(entry.job_id == job_id and entry.generation <= generation for entry in self.running()):
            self.ended(job_id, "stopped")
        else:
            self.send(ReplicasEnded(self.clock.now(), job_id, generation, "stopped"))


@dataclass(frozen=True)
class Fault:
    """What is wrong on the service's side, for tests of this test.

    Ends come late; one report does not come; changes are thought to cost, or do cost, something else.
    """

    late_seconds: float = 0.0
    lost_report: int | None = None
    expected_seconds: float = RESIZE_SECONDS
    pause_seconds: float = RESIZE_SECONDS


SOUND = Fault()


class Service:
    """The engine behind HTTP. It takes facts at any time and thinks when it is let."""

    def __init__(
        self, policy: str, options: dict[str, Any], world: SimulationSettings, home: Path, fault: Fault
    ) -> None:
        self.policy, self.options, self.world, self.home = policy, options, world, home
        self.fault = fault
        self.clock = ManualClock(0.0)
        self.backend = TwinBackend(Cluster.uniform(world.num_nodes, world.gpus_per_node), self.clock)
        self.tokens = Tokens.random()
        self.held = True
        self.num_reports = 0
        self.open()
        self.think()

    def open(self) -> None:
        settings = ServiceSettings(
            home=self.home, trigger=self.world.trigger, interval_seconds=self.world.interval_seconds,
            seed=self.world.seed, resize_seconds=self.fault.expected_seconds, url="http://127.0.0.1:1",
            snapshot_every_facts=1 + 40 * (self.world.seed % 2),
        )  # fmt: skip
        self.engine = Engine(
            policies.create(self.policy, **self.options), self.backend, open_store(self.home / "store.sqlite"),
            open_telemetry(self.home / "telemetry.sqlite"), settings, self.clock, self.tokens,
        )  # fmt: skip
        runner = self.engine.pipeline
        snapshot, due = runner.due_snapshot, runner.next_due
        runner.due_snapshot = lambda: None if self.held else snapshot()  # type: ignore[method-assign]
        runner.next_due = lambda deciding: due(deciding or self.held)  # type: ignore[method-assign]
        self.engine.start()
        self.client = TestClient(create_app(self.engine, self.tokens), base_url="http://127.0.0.1")
        self.client.__enter__()

    def close(self) -> None:
        self.client.__exit__(None, None, None)
        self.engine.stop("keep")

    def restart(self) -> None:
        # As after a kill: no last snapshot, so the newest one and the rest of the log make the state.
        self.engine.pipeline.save = lambda: None  # type: ignore[method-assign]
        self.close()
        self.open()

    @property
    def due(self) -> float | None:
        return self.engine.pipeline.controller.next_decision_at

    def think(self) -> None:
        """Let everything that is due at this time be decided and carried out."""
        self.held = False
        self.engine.loop.wait_until_idle()
        self.held = True

    def post(self, path: str, body: Any, token: str) -> None:
        answer = self.client.post(path, content=json.dumps(body), headers={"authorization": f"Bearer {token}"})
        assert answer.status_code in (200, 201), answer.text

    def submit(self, submission: Submission) -> None:
        self.post("/v1/jobs", job_to_mapping(submission), self.tokens.operator)

    def report(self, job_id: str, report: Report) -> None:
        self.num_reports += 1
        if self.num_reports != self.fault.lost_report:
            self.post(f"/v1/jobs/{job_id}/reports", encode(report), self.tokens.for_job(job_id))

    def started(self, job_id: str) -> None:
        self.backend.started(job_id)
        self.engine.loop.wait_until_idle()

    def finished(self, job_id: str) -> None:
        self.backend.ended(job_id, "succeeded")
        self.engine.loop.wait_until_idle()


class Execution:
    """Users, replicas and agents on the service's side: what happens when, by `SimulatedJob`s of their own."""

    def __init__(self, workload: Workload, service: Service, restarts: Iterable[float]) -> None:
        self.service, self.world = service, service.world
        self.adaptive = service.engine.policy.batch == "adaptive"
        self.arrivals = list(workload.jobs)
        self.restarts = sorted(restarts)
        self.num_restarts = 0
        self.jobs: dict[str, SimulatedJob] = {}
        self.generations: dict[str, int] = {}
        self.up_at: dict[str, float] = {}

    def by_events(self) -> None:
        """From moment to moment: an arrival, a job's news, replicas that are up, a decision that is due."""
        while self.arrivals or self.jobs:
            wakes = {job_id: job.next_news_at() for job_id, job in self.jobs.items()}
            known = [at for at in wakes.values() if at is not None] + list(self.up_at.values())
            now = min([*known, *(request.time for request in self.arrivals[:1]), *self._due()])
            self._go_to(now)
            self._restart_if(now, facts_are_in=False)
            for job_id in [job_id for job_id, at in self.up_at.items() if at <= now]:
                self._start(job_id)
            for job_id in [job_id for job_id, at in wakes.items() if at is not None and at <= now]:
                self._step(job_id, now)
            while self.arrivals and self.arrivals[0].time <= now:
                self._arrive(self.arrivals.pop(0))
            if any(due <= now for due in self._due()):
                for job_id in list(self.jobs):
                    self._step(job_id, now)
                self._restart_if(now, facts_are_in=True)
                self._decide(now)

    def by_rounds(self) -> None:
        """From round to round; within one, nothing moves anybody, so what happens in it is known at its beginning."""
        while self.arrivals or self.jobs:
            (end,) = self._due()
            happenings: list[tuple[float, Any]] = []
            for job_id, job in self.jobs.items():
                if self.up_at.get(job_id, end + 1.0) <= end:
                    happenings.append((self.up_at[job_id], lambda job_id=job_id: self._start(job_id)))
                job.advance(end)
                at = end if job.completed_at is None else job.completed_at
                happenings.append((at, lambda job_id=job_id: self._tell(job_id)))
            while self.arrivals and self.arrivals[0].time <= end:
                request = self.arrivals.pop(0)
                happenings.append((request.time, lambda request=request: self._arrive(request)))
            for at, happen in sorted(happenings, key=lambda entry: entry[0]):
                self._go_to(at)
                happen()
                self._restart_if(at, facts_are_in=False)
            self._go_to(end)
            self._restart_if(end, facts_are_in=True)
            self._decide(end)

    def _due(self) -> list[float]:
        due = self.service.due
        return [] if due is None else [due]

    def _go_to(self, now: float) -> None:
        self.service.clock.set(max(self.service.clock.time, now), self.service.engine)

    def _restart_if(self, now: float, facts_are_in: bool) -> None:
        """Restarts are in turn before the facts of a moment, and between these and their decision."""
        passed = [at for at in self.restarts if at <= now]
        if passed and (facts_are_in or self.num_restarts % 2 == 0):
            self.restarts = self.restarts[len(passed) :]
            self.num_restarts += 1
            self.service.restart()

    def _arrive(self, request: WorkloadJob) -> None:
        application = APPLICATIONS[request.application]
        batching = LearnedBatch(application) if self.adaptive else FixedBatch(application, request.batch_size)
        rounds = self.world.trigger == "rounds"
        self.jobs[request.name] = SimulatedJob(request.name, application, batching, rounds, clock=request.time)
        folder = str(self.service.home)
        run = ("sleep", "1")
        claims: dict[str, Any] = {"group": request.group, "deadline": request.deadline}
        self.service.submit(
            Submission(request.name, run, 1, request.num_gpus, workdir=folder, on_resize="live", **claims)
        )

    def _start(self, job_id: str) -> None:
        del self.up_at[job_id]
        self.service.started(job_id)

    def _step(self, job_id: str, now: float) -> None:
        self.jobs[job_id].advance(now)
        self._tell(job_id)

    def _tell(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.completed_at is not None:
            self._go_to(job.completed_at + self.service.fault.late_seconds)
            del self.jobs[job_id]
            self.service.finished(job_id)
        elif job.placement and (model := job.batching.model) is not None:
            assert isinstance(model, GoodputModel)
            self.service.report(job_id, self._report(job, model))

    def _report(self, job: SimulatedJob, model: GoodputModel) -> Report:
        assert job.batch is not None
        limits = model.limits
        return Report(
            generation=self.generations[job.id], step=int(job.progress), samples=int(job.progress) * limits.initial,
            progress=job.progress * limits.initial, epoch=float(job.epoch), num_replicas=job.placement.num_gpus,
            num_nodes=job.placement.num_nodes, batch_size=job.batch.total, local_batch=job.batch.local_batch,
            accumulation=job.batch.accumulation, total_progress=job.application.progress[-1] * limits.initial,
            model=model_report(model, ""), live=True,
        )  # fmt: skip

    def _decide(self, now: float) -> None:
        self.service.think()
        backend, pause_seconds = self.service.backend, self.service.fault.pause_seconds
        orders, backend.orders = backend.orders, []
        for job_id, generation, placement in orders:
            if placement:
                self.generations[job_id] = generation
                self.up_at[job_id] = now + pause_seconds
            else:
                self.up_at.pop(job_id, None)
                backend.left(job_id, generation)
            self.jobs[job_id].clock = now
            self.jobs[job_id].place(placement, pause_seconds)
        self.service.engine.loop.wait_until_idle()


@dataclass
class Twin:
    """Both sides of one workload."""

    policy: str
    trigger: Any
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = SimulationSettings(2, 4, self.trigger, resize_seconds=RESIZE_SECONDS, seed=self.seed)
        adaptive = policies.create(self.policy, **self.options).batch == "adaptive"
        self.workload = make_workload(self.seed, self.world.num_gpus, adaptive)
        random_ = random.Random(self.seed)
        arrivals = random_.sample([request.time for request in self.workload.jobs], 4)
        # Some while a decision is put off for the gap's sake, some at any time.
        self.restarts = sorted([at + 0.1 for at in arrivals] + [random_.uniform(10.0, 600.0) for _ in range(3)])

    def simulated(self) -> tuple[Log, RunOutcome]:
        log = Log()

        def record(event: Event, commands: Iterable[Command]) -> None:
            log.facts.append(event)
            log.take(event.at, commands)

        policy = Forgetful(policies.create(self.policy, **self.options), self.restarts)
        return log, simulate(self.workload, policy, APPLICATIONS, self.world, record=record, only_news=True)

    def served(self, home: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault = SOUND) -> tuple[Log, Service]:
        log = Log()
        execute = Executor.execute

        def recorded(self: Executor, commands: Iterable[Command], *more: Any) -> None:
            commands = list(commands)
            log.take(service.clock.now(), commands)
            execute(self, commands, *more)

        service = Service(self.policy, self.options, self.world, home, fault)
        monkeypatch.setattr(Executor, "execute", recorded)
        execution = Execution(self.workload, service, self.restarts)
        try:
            if self.trigger == "events":
                execution.by_events()
            else:
                execution.by_rounds()
            log.facts = [event for _, event in service.engine.store.read(0)]
        finally:
            service.close()
        assert not execution.restarts, "the run was over before the last restart"
        return log, service


def launches(log: Log) -> list[tuple[float, str, int, Placement]]:
    return [
        (at, command.job_id, command.generation, command.placement)
        for at, command in log.commands
        if isinstance(command, StartJob | ResizeJob)
    ]


TWINS = [
    Twin("pollux", "events", 1),
    Twin("pollux", "events", 2),
    Twin("pollux", "rounds", 3),
    Twin("fifo", "events", 4),
    Twin("las", "rounds", 5, {"quantum_gpu_seconds": 300.0}),
    Twin("tiresias", "events", 6, {"thresholds_gpu_seconds": (300.0,)}),
]


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.policy}-{twin.trigger}-{twin.seed}")
def test_the_service_does_what_the_simulator_does_and_when(twin, tmp_path, monkeypatch):
    simulated, outcome = twin.simulated()
    served, service = twin.served(tmp_path, monkeypatch)
    for index, (ours, theirs) in enumerate(zip(served.commands, simulated.commands, strict=False)):
        assert ours == theirs, f"command {index} of {len(simulated.commands)}"
    assert len(served.commands) == len(simulated.commands)
    assert service.backend.launched == launches(simulated), "commands did not reach the backend as they are"
    idle = [0.0] if twin.trigger == "events" else []
    assert served.decisions() == idle + simulated.decisions()
    assert len(served.facts) == len(simulated.facts) + twin.world.num_nodes + len(idle)
    assert sum(isinstance(fact, NodeAdded) for fact in served.facts) == twin.world.num_nodes
    for job in outcome.jobs:
        assert served.story(job.name) == simulated.story(job.name), job.name
        assert served.story(job.name)[-1] == ("over", "succeeded")


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.policy}-{twin.trigger}-{twin.seed}")
def test_the_workloads_have_something_to_show(twin):
    log, _ = twin.simulated()
    kinds = {type(command) for _, command in log.commands}
    reports = sum(isinstance(fact, JobReported) for fact in log.facts)
    assert len(log.commands) > NUM_JOBS or twin.policy == "fifo"
    if twin.policy == "pollux":
        assert ResizeJob in kinds
        assert reports > NUM_JOBS
    if twin.policy in ("las", "tiresias"):
        assert StopJob in kinds


FAULTS = {
    "ends 1 ms late": Fault(late_seconds=0.001),
    "a lost report": Fault(lost_report=1),
    "pauses 1 ms longer": Fault(pause_seconds=RESIZE_SECONDS + 0.001),
    "another expected cost": Fault(expected_seconds=3 * RESIZE_SECONDS),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_small_fault_is_seen_in_the_commands(fault, tmp_path, monkeypatch):
    twin = TWINS[1]
    served, _ = twin.served(tmp_path, monkeypatch, fault)
    assert served.commands != twin.simulated()[0].commands
