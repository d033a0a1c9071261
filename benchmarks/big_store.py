"""A service's home with a large, made-up past: thousands of jobs on a thousand nodes over a day, ready to be served.

The facts fit each other, as the controller itself checks. No replica ever ran: serve it with the fake backend of
`pollux.testing.servers.service` and the nodes that are returned.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pollux.controller import (
    Controller,
    ControllerSettings,
    DecisionMade,
    Event,
    GenerationEnded,
    JobReported,
    JobRunning,
    JobSubmitted,
    NodeAdded,
)
from pollux.controller.machine.reports import model_from
from pollux.controller.messages.job_spec import spec_from
from pollux.core import Cluster, Decision, Node, Placement, Reason
from pollux.store import SavedState, TelemetryRow, open_store, open_telemetry
from pollux.wire.codec import encode
from pollux.wire.home_layout import store_file, telemetry_file
from pollux.wire.job import JobRequest
from pollux.wire.report import ModelReport, NoiseReport, Report

__all__ = ["BigStore", "build_big_store"]

_T = TypeVar("_T")

_KINDS = ("resnet50-imagenet", "bert-base", "yolov5-coco", "deepspeech2", "neumf-movielens", "gpt-small", "vit-b16")
_QUEUES = ("vision", "language", "speech", "default")
_SIZES = (1, 2, 4, 8, 16, 32)
_GPU_TYPE = "a100"
_BATCH = 2000
_GPUS_PER_NODE = 8
_SEED = 1
_ROWS_PER_JOB, _ROWS_OF_ACTIVE = 6, 60
_START_SECONDS, _PAUSE_SECONDS = 15.0, 6.0


@dataclass(frozen=True, slots=True)
class BigStore:
    """What was built: the nodes that a backend must have, and how much there is of everything."""

    home: Path
    nodes: tuple[Node, ...]
    began_at: float
    now: float
    num_jobs: int
    num_active: int
    num_facts: int
    num_rows: int


@dataclass(slots=True)
class _Job:
    id: str
    request: JobRequest
    model: ModelReport
    submitted_at: float
    seconds: float
    size: int
    work: float
    wanted: int
    shares: dict[str, int] = field(default_factory=dict)
    generation: int = 0
    ends_at: float = 0.0
    started_at: float = 0.0

    @property
    def gpus(self) -> int:
        return sum(self.shares.values())

    @property
    def placement(self) -> Placement:
        return Placement(tuple(sorted(self.shares.items())))


class _Pool:
    """GPUs that are free on each node."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._free = {node.id: node.num_gpus for node in nodes}
        self._ring = list(self._free)
        self._next = 0

    def take(self, count: int) -> dict[str, int] | None:
        """So many on as few nodes as that goes, or None with nothing taken."""
        found: dict[str, int] = {}
        left = count
        for offset in range(len(self._ring)):
            node = self._ring[(self._next + offset) % len(self._ring)]
            free = self._free[node]
            if free and (free >= left or free >= 8):
                found[node] = min(free, left)
                left -= found[node]
                if not left:
                    self._next = (self._next + offset) % len(self._ring)
                    for name, taken in found.items():
                        self._free[name] -= taken
                    return found
        return None

    def give(self, shares: dict[str, int]) -> None:
        """Free again."""
        for node, count in shares.items():
            self._free[node] += count


class _Past:
    """Makes the facts of a day: jobs arrive, wait for room, are resized now and then, and succeed."""

    def __init__(self, nodes: tuple[Node, ...], jobs: list[_Job], began_at: float, now: float, seed: int) -> None:
        self._pool = _Pool(nodes)
        self._draw = random.Random(seed)
        self._arriving = list(reversed(jobs))
        self._waiting: list[_Job] = []
        self._running: dict[str, _Job] = {}
        self._ends: list[tuple[float, str]] = []
        self._began_at, self._now = began_at, now
        self._events: list[Event] = [NodeAdded(began_at, node) for node in nodes]

    def events(self, every: float) -> list[Event]:
        """All facts in order of time; decisions are so many seconds apart."""
        at = self._began_at + every
        while at < self._now - _START_SECONDS:
            self._until(at)
            self._decide(at)
            at += every
        self._until(self._now)
        for job in self._running.values():
            left = (job.ends_at - self._now) / max(job.ends_at - job.started_at, 1.0)
            self._events.append(self._report(job, self._now, left))
        self._events.sort(key=lambda event: event.at)
        return self._events

    def _until(self, at: float) -> None:
        while self._arriving and self._arriving[-1].submitted_at < at:
            job = self._arriving.pop()
            self._events.append(JobSubmitted(job.submitted_at, spec_from(job.request, job.id, 20.0)))
            self._waiting.append(job)
        while self._ends and self._ends[0][0] < at:
            ends_at, job_id = heapq.heappop(self._ends)
            ended = self._running.get(job_id)
            if ended is not None and ended.ends_at == ends_at:
                self._events.append(GenerationEnded(ends_at, job_id, ended.generation, "succeeded"))
                self._pool.give(ended.shares)
                del self._running[job_id]

    def _decide(self, at: float) -> None:
        allocation: dict[str, Placement] = {}
        reasons: dict[str, Reason] = {}
        for job in self._resized():
            before = job.gpus
            taken = self._pool.take(max(job.wanted, 1))
            if taken is None:
                continue
            self._pool.give(job.shares)
            job.shares = taken
            self._placed(job, at, before, allocation, reasons)
        left: list[_Job] = []
        for job in self._waiting:
            taken = self._pool.take(job.wanted) if len(left) < 20 else None
            if taken is None:
                left.append(job)
                continue
            job.shares, job.started_at = taken, at
            self._running[job.id] = job
            self._placed(job, at, 0, allocation, reasons)
        self._waiting = left
        if allocation:
            self._events.append(DecisionMade(at, 0, Decision(allocation, reasons=reasons), partial=True))

    def _resized(self) -> list[_Job]:
        """A few of those that run, with another number wanted."""
        found = []
        ids = list(self._running)
        for job_id in self._draw.sample(ids, min(-(-len(ids) // 60), 12)):
            job = self._running[job_id]
            other = self._draw.choice((job.gpus * 2, max(job.gpus // 2, 1)))
            limits = job.request
            if other != job.gpus and limits.min_gpus <= other <= limits.max_gpus and job.ends_at > 0:
                job.wanted = other
                found.append(job)
        return found

    def _placed(
        self, job: _Job, at: float, before: int, allocation: dict[str, Placement], reasons: dict[str, Reason]
    ) -> None:
        job.generation += 1
        after = job.gpus
        code = "started" if not before else "grew" if after > before else "shrank"
        allocation[job.id] = job.placement
        reasons[job.id] = Reason(code, {"gpus_before": float(before), "gpus_after": float(after)})
        pause = _START_SECONDS if not before else _PAUSE_SECONDS
        self._events.append(JobRunning(at + pause, job.id, job.generation))
        if not before:
            job.ends_at = at + pause + job.seconds
            self._events.append(self._report(job, at + pause + 1.0))
        else:
            # More GPUs end it sooner; never before its replicas are there.
            job.ends_at = max(at + pause + 5.0, at + (job.ends_at - at) * (before / after) ** 0.7)
        heapq.heappush(self._ends, (job.ends_at, job.id))

    def _report(self, job: _Job, at: float, left: float = 1.0) -> JobReported:
        return JobReported(at, job.id, goodput=model_from(job.model), remaining=job.work * left)


def build_big_store(
    home: Path,
    num_jobs: int = 10_000,
    num_nodes: int = 1_000,
    hours: float = 24.0,
    *,
    now: float,
    decide_every: float = 300.0,
) -> BigStore:
    """Fill an empty home with a day that ends at `now` (seconds since 1970); the same arguments give the same day.

    The cluster is about as full as it can be, and the last state is kept, so that a service starts quickly.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    began_at = now - hours * 3600.0
    draw = random.Random(_SEED)
    nodes = tuple(Node(f"node-{index:04d}", _GPUS_PER_NODE, _GPU_TYPE) for index in range(num_nodes))
    seconds = 0.9 * num_nodes * _GPUS_PER_NODE * hours * 3600.0 / max(num_jobs, 1)
    jobs = [
        _job(index, num_jobs, began_at, now, seconds, draw, num_nodes * _GPUS_PER_NODE) for index in range(num_jobs)
    ]
    events = _Past(nodes, jobs, began_at, now, _SEED).events(decide_every)
    controller = Controller(Cluster(()), ControllerSettings("rounds"))
    controller.start(began_at)
    with contextlib.closing(open_store(store_file(home))) as store:
        written = 0
        for batch in _batches(_applied(events, controller), _BATCH):
            written = store.append(batch)
        store.save(SavedState(written, controller.state()))
    rows = 0
    with contextlib.closing(open_telemetry(telemetry_file(home))) as telemetry:
        active = set(controller.active)
        for group in _batches(_rows(jobs, active, now, _ROWS_PER_JOB, _ROWS_OF_ACTIVE), _BATCH):
            telemetry.record(group)
            rows += len(group)
    return BigStore(home, nodes, began_at, now, num_jobs, len(controller.active), written, rows)


def _job(
    index: int, num_jobs: int, began_at: float, now: float, gpu_seconds: float, draw: random.Random, gpus: int
) -> _Job:
    name = f"{draw.choice(_KINDS)}-{index:05d}"
    size = min(draw.choices(_SIZES, (8, 10, 20, 30, 12, 4))[0], max(gpus // 2, 1))
    request = JobRequest(
        name=name, run=("python", "train.py", "--seed", str(index)), min_gpus=1, max_gpus=max(2 * size, 1),
        queue=draw.choice(_QUEUES), priority=draw.choices(("low", "normal", "high"), (1, 8, 1))[0],
    )  # fmt: skip
    noise = draw.uniform(100.0, 3000.0)
    compute = draw.uniform(0.001, 0.004)
    model = ModelReport((0.02, compute, 0.02, 0.003, 0.01, 0.002, 1.5), _GPU_TYPE, 128, 8192, 512, 1.0, noise)
    submitted_at = began_at + 1.0 + (now - began_at - 2.0) * index / max(num_jobs, 1)
    seconds = max(gpu_seconds / size * draw.uniform(0.3, 1.7), 60.0)
    work = float(model_from(model).goodput(1, 1, _GPU_TYPE)) * seconds * size**0.8
    return _Job(name, request, model, submitted_at, seconds, size, work, size)


def _applied(events: Iterable[Event], controller: Controller) -> Iterator[Event]:
    """Every fact as the controller took it: a decision that does not fit is a mistake, and raised."""
    for event in events:
        if isinstance(event, DecisionMade):
            event = replace(event, revision=controller.revision)
        controller.apply(event)
        yield event


def _rows(jobs: Iterable[_Job], active: set[str], now: float, few: int, many: int) -> Iterator[TelemetryRow]:
    for job in jobs:
        if not job.started_at:
            continue
        end = min(job.ends_at, now)
        count = many if job.id in active else few
        done = min((now - job.started_at) / max(job.ends_at - job.started_at, 1.0), 1.0)
        for index in range(count):
            share = (index + 1) / count
            at = job.started_at + _START_SECONDS + (end - job.started_at - _START_SECONDS) * share
            yield TelemetryRow(
                job.id, max(at, job.started_at + _START_SECONDS), "report", encode(_report(job, share, done))
            )


def _report(job: _Job, share: float, done: float) -> Report:
    """A report when a `share` of the reports was sent, of a job of which so much is `done` at the last."""
    noise = job.model.grad_var * (0.5 + share)
    batch = int(min(128 * job.gpus * (1.0 + 2.0 * share), job.model.max_batch))
    efficiency = (noise + 128.0) / (noise + batch)
    rate = 300.0 * job.gpus**0.85
    total = job.work
    return Report(
        generation=max(job.generation, 1), step=int(1000 * share), samples=int(total * share),
        progress=total * share * done, epoch=10.0 * share, num_replicas=job.gpus, num_nodes=max(len(job.shares), 1),
        batch_size=batch, local_batch=max(batch // max(job.gpus, 1), 1), accumulation=0,
        learning_rate_factor=(batch / 128.0) ** 0.5, efficiency=efficiency, throughput=rate, step_seconds=batch / rate,
        goodput=rate * efficiency, total_progress=total, noise=NoiseReport(noise, noise * 0.8, noise * 1.25, 500),
        model=job.model, loss=2.5 / (1.0 + 4.0 * share), metrics={"accuracy": 0.2 + 0.6 * share},
        checkpoint_age_seconds=60.0, exact=False,
    )  # fmt: skip


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    batch: list[_T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
