"""The same workload twice: through HTTP, the backend's stream, a SQLite store and restarts; and through an execution
model that drives a controller directly. What is started and stopped, and when, must be the same.

Here is what the simulator does not know: crashes, pauses, cancellations, queues, nodes that go and come. The simulator
itself is the other side in `test_twin_simulator`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pollux import policies
from pollux.backends.protocol import (
    BackendCapabilities,
    Launch,
    LogChunk,
    NodeDown,
    NodeUp,
    ReplicasEnded,
    ReplicasStarted,
    Running,
)
from pollux.controller import (
    ENDED,
    Controller,
    ControllerSettings,
    DecisionMade,
    GenerationEnded,
    JobCancelled,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobState,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    ResizeJob,
    StartJob,
    StopJob,
    TimerFired,
    model_from,
    spec_from,
)
from pollux.core import Cluster, JobLimits, Node, Placement, Queue
from pollux.service import Engine, ServiceSettings, Tokens, create_app
from pollux.store import open_store, open_telemetry
from pollux.testing.servers.service import ManualClock
from pollux.wire.codec import encode
from pollux.wire.job import JobRequest
from pollux.wire.jobfile import job_to_mapping
from pollux.wire.report import ModelReport, Report

START = 1000.0
RESIZE_SECONDS = 7.0
NODES = [Node("node-0", 4, "cpu"), Node("node-1", 4, "cpu")]

Action = tuple[Any, ...]


@dataclass(frozen=True)
class Truth:
    """What a job really is: its work in useful samples, its speed, and when it fails."""

    work: float
    parameters: tuple[float, ...]
    noise: float
    crash_at: float | None = None
    outcome: str = "crashed"


@dataclass
class Replicas:
    generation: int
    placement: Placement
    ready_at: float
    leaves_at: float | None = None


class Machines:
    """The execution model: replicas come up, train, report, end. Knows nothing of controllers or services."""

    def __init__(self, truths: dict[str, Truth]) -> None:
        self.truths = truths
        self.log: list[Action] = []
        self.done: dict[str, float] = dict.fromkeys(truths, 0.0)
        self.here: dict[str, Replicas] = {}
        self.next_up: dict[str, Replicas] = {}
        self.crashed: set[str] = set()
        self.ended: dict[str, tuple[int, str]] = {}
        self.events: list[tuple[float, int, Action]] = []
        self.count = itertools.count()
        self.trained_to: dict[str, float] = {}

    def start(self, now: float, job: str, generation: int, placement: Placement) -> None:
        self.log.append((now, "start", job, generation, placement.shares))
        new = Replicas(generation, placement, now + 7.0)
        if job in self.here:
            self.next_up[job] = new
        else:
            self.come_up(now, job, new)

    def stop(self, now: float, job: str, generation: int) -> None:
        self.log.append((now, "stop", job, generation))
        waiting = self.next_up.get(job)
        if waiting is not None and waiting.generation <= generation:
            del self.next_up[job]
        running = self.here.get(job)
        if running is not None and running.generation <= generation and running.leaves_at is None:
            running.leaves_at = now + 2.5
            self.later(running.leaves_at, ("gone", job, running.generation))

    def come_up(self, now: float, job: str, replicas: Replicas) -> None:
        replicas.ready_at = max(replicas.ready_at, now + 7.0)
        self.here[job] = replicas
        self.ended.pop(job, None)
        self.later(replicas.ready_at, ("up", job, replicas.generation))

    def later(self, at: float, event: Action) -> None:
        heapq.heappush(self.events, (at, next(self.count), event))

    def next_moment(self) -> float | None:
        return self.events[0][0] if self.events else None

    def model(self, job: str) -> ModelReport:
        truth = self.truths[job]
        noise = truth.noise * (1.0 + 3.0 * self.done[job] / truth.work)
        return ModelReport(truth.parameters, "cpu", 128, 4096, 512, 1.0, noise)

    def rate(self, job: str, placement: Placement) -> float:
        return model_from(self.model(job)).goodput(placement.num_nodes, placement.num_gpus, "cpu")

    def happen(self, now: float) -> list[Action]:
        """What happens at this moment: (kind, job, generation, more), in order."""
        _, _, (kind, job, generation) = heapq.heappop(self.events)
        running = self.here.get(job)
        if running is None or running.generation != generation:
            return []
        if kind == "up":
            if running.leaves_at is not None:
                return []
            self.trained_to[job] = now
            self.later(now + 5.0, ("tick", job, generation))
            return [("started", job, generation)]
        if kind == "tick":
            return self.tick(now, job, running)
        return self.leave(now, job, running, "stopped")

    def tick(self, now: float, job: str, running: Replicas) -> list[Action]:
        if running.leaves_at is not None:
            return []
        truth = self.truths[job]
        rate = self.rate(job, running.placement)
        self.done[job] = min(self.done[job] + rate * (now - self.trained_to[job]), truth.work)
        self.trained_to[job] = now
        if truth.crash_at is not None and job not in self.crashed and self.done[job] >= truth.crash_at * truth.work:
            self.crashed.add(job)
            return self.leave(now, job, running, truth.outcome)
        if self.done[job] >= truth.work:
            return self.leave(now, job, running, "succeeded")
        self.later(now + min(30.0, (truth.work - self.done[job]) / rate + 0.25), ("tick", job, running.generation))
        return [("report", job, running.generation, self.report(job, running, rate))]

    def leave(self, now: float, job: str, running: Replicas, outcome: str) -> list[Action]:
        del self.here[job]
        self.ended[job] = (running.generation, outcome)
        following = self.next_up.pop(job, None)
        if following is not None:
            self.come_up(now, job, following)
        return [("ended", job, running.generation, outcome)]

    def lose(self, now: float, node_id: str) -> None:
        """A node is gone, with what ran there."""
        for job, running in list(self.here.items()):
            if running.placement.on(node_id):
                del self.here[job]
                following = self.next_up.pop(job, None)
                if following is not None:
                    self.come_up(now, job, following)

    def report(self, job: str, running: Replicas, rate: float) -> Report:
        placement = running.placement
        return Report(
            generation=running.generation, step=int(self.done[job]), samples=int(self.done[job]) * 2,
            progress=self.done[job], epoch=self.done[job] / self.truths[job].work, num_replicas=placement.num_gpus,
            num_nodes=placement.num_nodes, batch_size=128, local_batch=64, accumulation=1, goodput=rate,
            total_progress=self.truths[job].work, model=self.model(job), resize_seconds=9.5,
        )  # fmt: skip


class Direct:
    """The controller driven by the model, without service, store or wire."""

    def __init__(self, machines: Machines, policy: str, trigger: str) -> None:
        self.machines = machines
        self.policy = policies.create(policy)
        self.controller = Controller(Cluster(()), ControllerSettings(trigger=trigger))  # type: ignore[arg-type]
        self.controller.start(START)
        self.now = START
        for node in NODES:
            self.apply(NodeAdded(START, node))
        self.settle()

    def due(self) -> float | None:
        times = [self.controller.next_decision_at, self.controller.next_timer_at]
        return min((at for at in times if at is not None), default=None)

    def settle(self) -> None:
        while True:
            timer, decision = self.controller.next_timer_at, self.controller.next_decision_at
            if timer is not None and timer <= self.now:
                self.apply(TimerFired(self.now))
            elif decision is not None and decision <= self.now:
                snapshot = self.controller.snapshot(self.now)
                answer = self.policy.allocate(snapshot)
                narrow = self.controller.narrowed(answer)
                self.apply(DecisionMade(self.now, snapshot.revision, narrow, partial=True))
                self.controller.remember(answer.memory)
            else:
                return

    def apply(self, event: Any) -> None:
        commands = self.controller.apply(event)
        for command in commands:
            if isinstance(command, StopJob):
                self.machines.stop(self.now, command.job_id, command.generation)
            elif isinstance(command, ResizeJob) and not self._is_live(command):
                self.machines.stop(self.now, command.job_id, command.generation - 1)
        for command in commands:
            if isinstance(command, ResizeJob) and self._is_live(command):
                # An order to the backend, like a start; these machines know no other way than to restart.
                self.machines.stop(self.now, command.job_id, command.generation - 1)
            if isinstance(command, StartJob | ResizeJob):
                self.machines.start(self.now, command.job_id, command.generation, command.placement)

    def _is_live(self, command: ResizeJob) -> bool:
        return self.controller.jobs[command.job_id].moves_live

    def at(self, now: float) -> None:
        self.now = now
        self.settle()

    def restart(self) -> None:
        self.controller.remember(None)

    def user(self, action: Action) -> None:
        kind, *more = action
        self.apply(getattr(self, f"_{kind}")(*more))
        self.settle()

    def _submit(self, request: JobRequest) -> Any:
        gpus = self.controller.cluster.num_gpus
        return JobSubmitted(self.now, spec_from(request, request.name, RESIZE_SECONDS, gpus))

    def _cancel(self, job: str) -> Any:
        return JobCancelled(self.now, job)

    def _pause(self, job: str) -> Any:
        return JobPaused(self.now, job)

    def _resume(self, job: str) -> Any:
        return JobResumed(self.now, job)

    def _resize(self, job: str, low: int, high: int) -> Any:
        limits = self.controller.jobs[job].spec.limits
        return JobLimitsChanged(self.now, job, JobLimits(low, high, preemptible=limits.preemptible))

    def _queue(self, name: str, weight: float, quota: int | None) -> Any:
        return QueueChanged(self.now, Queue(name, weight, quota))

    def _lose(self, node_id: str) -> Any:
        self.machines.lose(self.now, node_id)
        return NodeRemoved(self.now, node_id)

    def _gain(self, node: Node) -> Any:
        return NodeAdded(self.now, node)

    def world(self, event: Action) -> None:
        kind, job, generation, *more = event
        record = self.controller.jobs[job]
        current = record.generation == generation and record.state not in ENDED
        if kind == "started":
            if current and record.state in (JobState.STARTING, JobState.RESIZING):
                self.apply(JobRunning(self.now, job, generation))
        elif kind == "report":
            report = more[0]
            model = model_from(report.model, record.local_batch_max)
            left = report.total_progress - report.progress
            fact = JobReported(self.now, job, model, left, report.resize_seconds, report.local_batch, live=report.live)
            if current and self.controller.is_news(fact):
                self.apply(fact)
        elif record.state not in ENDED and (current or more[0] == "succeeded"):
            self.apply(GenerationEnded(self.now, job, generation, more[0]))
        self.settle()

    def states(self) -> dict[str, str]:
        return {job_id: str(record.state) for job_id, record in self.controller.jobs.items()}


class TwinBackend(BackendCapabilities):
    """The machines behind the backend's protocol."""

    name = "twin"
    healthy = True
    restart_seconds = RESIZE_SECONDS
    live_seconds = RESIZE_SECONDS

    def __init__(self, machines: Machines, clock: ManualClock) -> None:
        self.machines, self.clock = machines, clock
        self.nodes = {node.id: node for node in NODES}
        self.listener: Any = None

    def start(self, listener: Any) -> None:
        self.listener = listener

    def inventory(self) -> tuple[Node, ...]:
        return tuple(self.nodes.values())

    def submit(self, launch: Launch) -> None:
        self.machines.start(self.clock.now(), launch.job_id, launch.generation, launch.placement)

    def resize(self, launch: Launch) -> None:
        self.stop(launch.job_id, launch.generation - 1, launch.grace_seconds)
        self.submit(launch)

    def stop(self, job_id: str, generation: int, grace_seconds: float) -> None:
        self.machines.stop(self.clock.now(), job_id, generation)

    def running(self) -> tuple[Running, ...]:
        there = {**self.machines.here, **self.machines.next_up}
        return tuple(Running(job, replicas.generation, "running") for job, replicas in there.items())

    def logs(self, job_id: str, replica: int = 0, offset: int = 0, limit: int = 65536) -> LogChunk:
        return LogChunk("", 0, True)

    def forget(self, job_id: str) -> None:
        pass

    def close(self) -> None:
        self.listener = None


class Served:
    """The service: requests over HTTP, the backend's stream, a store on disk, restarts."""

    def __init__(self, machines: Machines, policy: str, trigger: str, home: Path) -> None:
        self.machines, self.policy, self.home = machines, policy, home
        self.trigger = trigger
        self.clock = ManualClock(START)
        self.backend = TwinBackend(machines, self.clock)
        self.tokens = Tokens.random()
        self.open()

    def open(self) -> None:
        settings = ServiceSettings(resize_seconds=RESIZE_SECONDS,
            home=self.home, trigger=self.trigger, url="http://127.0.0.1:1", snapshot_every_facts=37  # type: ignore[arg-type]
        )  # fmt: skip
        self.engine = Engine(
            policies.create(self.policy), self.backend, open_store(self.home / "store.sqlite"),
            open_telemetry(self.home / "telemetry.sqlite"), settings, self.clock, self.tokens,
        )  # fmt: skip
        self.engine.start()
        self.client = TestClient(create_app(self.engine, self.tokens), base_url="http://127.0.0.1")
        self.client.__enter__()
        self.engine.loop.wait_until_idle()

    def close(self) -> None:
        self.client.__exit__(None, None, None)
        self.engine.stop("keep")

    def restart(self) -> None:
        # As after a kill: no last snapshot, so the newest one and the rest of the log make the state.
        self.engine.pipeline.save = lambda: None  # type: ignore[method-assign]
        self.close()
        self.open()

    def due(self) -> float | None:
        return self.engine.loop.next_due()

    def at(self, now: float) -> None:
        self.clock.set(now, self.engine)
        self.engine.loop.wait_until_idle()

    def post(self, path: str, body: Any = None, method: str = "POST", token: str | None = None) -> None:
        header = {"authorization": f"Bearer {token or self.tokens.operator}"}
        content = None if body is None else json.dumps(body)
        answer = self.client.request(method, path, content=content, headers=header)
        assert answer.status_code in (200, 201), answer.text
        self.engine.loop.wait_until_idle()

    def user(self, action: Action) -> None:
        kind, *more = action
        if kind == "submit":
            self.post("/v1/jobs", job_to_mapping(more[0]))
        elif kind == "queue":
            self.post(f"/v1/queues/{more[0]}", {"weight": more[1], "gpu_quota": more[2]}, "PUT")
        elif kind == "resize":
            self.post(f"/v1/jobs/{more[0]}/resize", {"gpus": f"{more[1]}..{more[2]}"})
        elif kind == "lose":
            self.machines.lose(self.clock.now(), more[0])
            del self.backend.nodes[more[0]]
            self.tell(NodeDown(self.clock.now(), more[0]))
        elif kind == "gain":
            self.backend.nodes[more[0].id] = more[0]
            self.tell(NodeUp(self.clock.now(), more[0]))
        else:
            self.post(f"/v1/jobs/{more[0]}/{kind}")

    def tell(self, event: Any) -> None:
        self.backend.listener(event)
        self.engine.loop.wait_until_idle()

    def world(self, event: Action) -> None:
        kind, job, generation, *more = event
        if kind == "started":
            self.tell(ReplicasStarted(self.clock.now(), job, generation))
        elif kind == "report":
            self.post(f"/v1/jobs/{job}/reports", encode(more[0]), token=self.tokens.for_job(job))
        else:
            self.tell(ReplicasEnded(self.clock.now(), job, generation, more[0]))

    def states(self) -> dict[str, str]:
        return {status.id: status.state for status in self.engine.jobs()}


@dataclass
class Plot:
    """What happens from outside: users' actions, nodes that go and come, restarts of the service."""

    truths: dict[str, Truth]
    actions: list[tuple[float, Action]] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)


def make_plot(seed: int, home: Path) -> Plot:
    random_ = random.Random(seed)
    plot = Plot({})
    at = START + 3.0
    for number in range(8):
        name = f"job-{number}"
        parameters = (0.05 * random_.random(), 0.002 + 0.004 * random_.random(), 0.02, 0.002, 0.01, 0.001, 1.6)
        crash = random_.choice([None, None, 0.3])
        outcome = random_.choice(["crashed", "out-of-memory"])
        plot.truths[name] = Truth(random_.uniform(4e4, 3e5), parameters, random_.uniform(50, 2000), crash, outcome)
        low = random_.choice([1, 1, 2])
        request = JobRequest(
            name, ("sleep", "1"), low, random_.choice([low, 4, 8]), workdir=str(home),
            priority=random_.choice(["normal", "high"]), queue=random_.choice(["default", "vision"]),
            after=("job-0",) if number == 5 else (), time_limit_seconds=400.0 if number == 6 else None,
        )  # fmt: skip
        plot.actions.append((at, ("submit", request)))
        at += random_.expovariate(1 / 40.0)
    plot.actions += [
        (START + 90.0, ("queue", "vision", 2.0, 6)),
        (START + 151.0, ("pause", "job-1")),
        (START + 230.5, ("resume", "job-1")),
        (START + 260.0, ("lose", "node-1")),
        (START + 300.0, ("gain", NODES[1])),
        (START + 333.0, ("cancel", "job-2")),
    ]
    plot.actions.sort(key=lambda entry: entry[0])
    plot.restarts = [START + random_.uniform(20, 60), START + random_.uniform(120, 400)]
    return plot


def play(side: Direct | Served, plot: Plot, until: float = START + 6000.0) -> None:
    """Let everything happen in the order of time: users first, then machines, then what is due by itself."""
    actions, restarts = list(plot.actions), list(plot.restarts)
    while True:
        moments = [actions[0][0] if actions else None, side.machines.next_moment(), side.due()]
        known = [moment for moment in moments if moment is not None]
        now = min(known, default=until)
        over = (
            not actions and side.states() and all(state in {str(s) for s in ENDED} for state in side.states().values())
        )
        if now >= until or over:
            return
        if restarts and restarts[0] <= now:
            restarts.pop(0)
            side.restart()
            continue
        side.at(now)
        while actions and actions[0][0] <= now:
            _, action = actions.pop(0)
            if action[0] in ("submit", "queue", "lose", "gain") or allowed(side, action):
                side.user(action)
        while (moment := side.machines.next_moment()) is not None and moment <= now:
            for event in side.machines.happen(now):
                side.world(event)


def allowed(side: Direct | Served, action: Action) -> bool:
    """Whether the action is legal in the job's present state: what is refused is for other tests."""
    state = side.states().get(action[1])
    if action[0] == "resume":
        return state == "paused"
    return state in {"queued", "starting", "running", "resizing"}


CASES = [
    ("pollux", "events", 1), ("pollux", "events", 2), ("pollux", "rounds", 3), ("fifo", "events", 7),
    ("las", "rounds", 5), ("tiresias", "events", 6),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "trigger", "seed"), CASES)
def test_both_sides_do_the_same_at_the_same_times(policy, trigger, seed, tmp_path):
    plot = make_plot(seed, tmp_path)
    direct = Direct(Machines(plot.truths), policy, trigger)
    play(direct, plot)
    served = Served(Machines(plot.truths), policy, trigger, tmp_path)
    try:
        play(served, plot)
        ours, theirs = served.machines.log, direct.machines.log
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            assert mine == other, f"action {index} of {len(theirs)}"
        assert len(ours) == len(theirs)
        assert served.states() == direct.states()
        assert served.engine.pipeline.controller.revision == direct.controller.revision
        assert served.engine.store.revision == direct.controller.revision
    finally:
        served.close()
    assert len(theirs) > len(plot.truths), "nothing was ever moved: the workload shows nothing"
    assert "succeeded" in direct.states().values()
