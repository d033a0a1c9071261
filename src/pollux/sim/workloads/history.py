"""A cluster's own history as a workload: each job becomes an application from what it learned and reported.

`pollux.store.history` writes histories; docs/history.md describes the format.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pollux.controller import (
    ENDED,
    DecisionMade,
    Event,
    JobRecord,
    JobReported,
    JobState,
    NodeRemoved,
    model_from,
)
from pollux.controller.machine.reports import limited
from pollux.controller.messages.events import GenerationEnded
from pollux.core import InvalidInput, JobLimits, PolluxError, Queue
from pollux.goodput import BatchLimits, GoodputModel, PublishedThroughput
from pollux.sim.applications.application import Application, FixedConfiguration, Terms
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.workloads.workload import Workload, WorkloadJob, check_applications
from pollux.store.history import HistoryContents, parse, start
from pollux.wire import codec
from pollux.wire.report import ModelReport

__all__ = ["History", "NoiseTable", "RecordedApplication", "read_history"]

# The number of shares of a training with their own noise, and the most epochs of a replay.
_MOST_EPOCHS = 50
# Samples a second and GPU of a job without a model, so that its batch can be split over other numbers of GPUs.
_UNIT = 840
# In rounds, the simulator rounds the ends of epochs to seconds, so epochs must not be shorter.
_EPOCH_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class NoiseTable(NoiseSchedule):
    """Measured φ: (share of the training, φ in samples), ascending; geometric in between, constant beyond."""

    points: tuple[tuple[float, float], ...] = ()

    def at(self, share: float) -> float:
        """φ(x) between the two measurements around x."""
        before, after = self.points[0], self.points[-1]
        for point in self.points:
            if point[0] <= share:
                before = point
            else:
                after = point
                break
        if share <= before[0] or after[0] <= before[0]:
            return before[1] if share >= before[0] else self.points[0][1]
        weight = min((share - before[0]) / (after[0] - before[0]), 1.0)
        return math.exp((1.0 - weight) * math.log(before[1]) + weight * math.log(after[1]))


@dataclass(frozen=True, slots=True)
class RecordedApplication(ModelledApplication):
    """One job of a history, with the limits of its user. A rigid job keeps its number of GPUs."""

    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True, slots=True)
class History:
    """A history, ready to be simulated: times are in seconds from the first submission, applications go by job id.

    `num_nodes` nodes of `gpus_per_node` are the most the cluster had; `resize_seconds` is the median pause that jobs
    measured (30 where none did). `skipped` says which jobs are left out and why, and what could not be kept.
    """

    workload: Workload
    applications: Mapping[str, Application]
    num_nodes: int
    gpus_per_node: int
    skipped: tuple[str, ...] = ()
    resize_seconds: float = 30.0

    def on(self, num_nodes: int, gpus_per_node: int) -> tuple[Workload, tuple[str, ...]]:
        """The jobs that a cluster of that size can run, and for each other job, why it cannot.

        A job that asked for more GPUs than there are, and can use fewer, asks for all that it can have.
        """
        jobs, left_out = [], []
        for job in self.workload.jobs:
            terms = _terms(self.applications[job.application])
            most, least = terms.most_gpus(num_nodes, gpus_per_node), terms.limits.min_gpus
            if most < least:
                left_out.append(f"job '{job.name}': needs {_gpus(least)} at once, and can have {most}")
            else:
                jobs.append(replace(job, num_gpus=min(job.num_gpus, most)))
        return replace(self.workload, jobs=tuple(jobs)), tuple(left_out)


def read_history(source: Path | Iterable[bytes | str]) -> History:
    """Read a history, from a file or from lines."""
    if not isinstance(source, Path):
        return _history_of(parse(source), "history")
    try:
        with source.open("rb") as lines:
            contents = parse(lines)
    except OSError as error:
        raise InvalidInput(
            f"{source}: cannot be read ({error.strerror}); give a file of 'pollux history export'"
        ) from None
    except PolluxError as error:
        raise InvalidInput(f"{source}: {error}") from None
    return _history_of(contents, source.stem)


@dataclass(slots=True)
class _Life:
    """What a job did: (seconds, nodes, GPUs) of each interval without a later crash, and its reports."""

    record: JobRecord
    stretches: list[tuple[float, int, int]] = field(default_factory=list)
    lost_seconds: float = 0.0
    running_since: float | None = None
    shape: tuple[int, int] = (0, 0)
    stretches_before_first: int = 0
    first_remaining: float | None = None
    last_remaining: float | None = None
    noise: list[tuple[float, float]] = field(default_factory=list)
    progress: float | None = None
    total: float | None = None
    rows: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _, _ in self.stretches)

    def close(self, at: float, counts: bool = True) -> None:
        """End the present interval, if any; an interval that ends with a crash does not count."""
        if self.running_since is not None:
            seconds = max(at - self.running_since, 0.0)
            if counts:
                self.stretches.append((seconds, *self.shape))
            else:
                self.lost_seconds += seconds
        self.running_since = None

    def follow(self, at: float, counts: bool = True) -> None:
        """Update from the job's record after an event."""
        shape = (self.record.placement.num_nodes, self.record.placement.num_gpus)
        is_running = self.record.state is JobState.RUNNING
        if self.running_since is not None and not (is_running and shape == self.shape):
            self.close(at, counts)
        if is_running and self.running_since is None:
            self.running_since, self.shape = at, shape

    def report(self, event: JobReported) -> None:
        """Note the remaining work; the first time, split the interval there, to know what was done before."""
        if event.remaining is not None:
            self.last_remaining = event.remaining
            if self.first_remaining is None:
                self.first_remaining = event.remaining
                self.close(event.at)
                self.stretches_before_first = len(self.stretches)
                self.follow(event.at)
        if isinstance(event.goodput, GoodputModel) and self.last_remaining is not None:
            self.noise.append((self.last_remaining, event.goodput.efficiency.noise_scale))


class _Past:
    """Applies the facts to a controller, and follows each job."""

    def __init__(self, contents: HistoryContents) -> None:
        self.controller = start(contents)
        self.lives: dict[str, _Life] = {}
        self.largest = self.controller.cluster
        self.pauses: list[float] = []
        for record in self.controller.jobs.values():
            self.lives[record.spec.id] = life = _Life(record)
            if record.largest_gpus:
                life.stretches.append((record.attained_gpu_seconds / record.largest_gpus, 1, record.largest_gpus))
            life.first_remaining = life.last_remaining = record.remaining
            life.stretches_before_first = len(life.stretches)
            life.follow(record.held_since)
        for revision, event in contents.to_apply:
            try:
                self._take(event)
            except PolluxError as error:
                raise InvalidInput(f"fact {revision} does not fit those before it: {error}") from None
        self.end = max((event.at for _, event in contents.facts), default=0.0)
        for row in contents.telemetry:
            if row.kind == "report" and row.job_id in self.lives:
                self.lives[row.job_id].rows.append(row.values)
                self.end = max(self.end, row.at)
        for life in self.lives.values():
            life.close(self.end)

    def _take(self, event: Event) -> None:
        before = self._last_pause(event)
        self.controller.apply(event)
        if self.controller.cluster.num_gpus > self.largest.num_gpus:
            self.largest = self.controller.cluster
        counts = not (isinstance(event, GenerationEnded) and event.outcome in ("crashed", "out-of-memory", "lost"))
        for job_id in self._touched(event):
            record = self.controller.jobs.get(job_id)
            if record is not None:
                life = self.lives.setdefault(job_id, _Life(record))
                life.record = record
                life.follow(event.at, counts)
        if isinstance(event, JobReported) and event.job_id in self.lives:
            self.lives[event.job_id].report(event)
            if event.resize_cost_seconds is not None and not event.resize_kind:
                self.pauses.append(event.resize_cost_seconds)
        pause = self._last_pause(event)
        if pause is not None and pause != before:
            self.pauses.append(pause[0][1])

    def _last_pause(self, event: Event) -> tuple[tuple[str, float], int | None] | None:
        """The last pause of the job that the event is about, and the generation that it began."""
        record = self.controller.jobs.get(getattr(event, "job_id", ""))
        return None if record is None or record.last_pause is None else (record.last_pause, record.paused_generation)

    def _touched(self, event: Event) -> Iterator[str]:
        if isinstance(event, DecisionMade | NodeRemoved):
            yield from [job_id for job_id, life in self.lives.items() if life.record.state not in ENDED]
        spec = getattr(event, "spec", None)
        job_id = getattr(event, "job_id", None) if spec is None else spec.id
        if job_id is not None:
            yield job_id


def _history_of(contents: HistoryContents, name: str) -> History:
    past = _Past(contents)
    nodes = [node for node in past.largest.nodes if node.num_gpus]
    if not nodes:
        raise InvalidInput("the history names no node with GPUs; export one of a service that had some")
    gpus_per_node = max(node.num_gpus for node in nodes)
    num_nodes = math.ceil(sum(node.num_gpus for node in nodes) / gpus_per_node)
    skipped = []
    if any(node.num_gpus != gpus_per_node for node in nodes):
        skipped.append(f"nodes of different sizes: taken as {num_nodes} x {gpus_per_node} GPUs")
    types = [node.gpu_type for node in nodes]
    gpu_type = max(set(types), key=types.count)
    applications: dict[str, Application] = {}
    jobs = []
    for job_id, life in past.lives.items():
        queue = past.controller.queues.get(life.record.spec.queue)
        try:
            application = _application(life, gpu_type, queue)
            job = _request(life, application, num_nodes, gpus_per_node)
            check_applications(Workload(name, (job,)), {job_id: application}, num_nodes * gpus_per_node)
        except PolluxError as error:
            skipped.append(f"job '{job_id}': {error}")
            continue
        applications[job_id] = application
        jobs.append(job)
    first = min((job.time for job in jobs), default=0.0)
    shifted = sorted(
        (WorkloadJob(job.name, job.time - first, job.name, job.num_gpus, job.batch_size, job.source) for job in jobs),
        key=lambda job: job.time,
    )
    pause = statistics.median(past.pauses) if past.pauses else 30.0
    return History(Workload(name, tuple(shifted)), applications, num_nodes, gpus_per_node, tuple(skipped), pause)


def _terms(application: Application) -> Terms:
    assert isinstance(application, RecordedApplication)
    return application.terms


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"


def _request(life: _Life, application: RecordedApplication, num_nodes: int, gpus_per_node: int) -> WorkloadJob:
    spec, limits, terms = life.record.spec, application.limits, application.terms
    wanted = application.fixed.num_gpus if application.fixed is not None else spec.requested_gpus
    most = min(terms.most_gpus(num_nodes, gpus_per_node), limits.maximum // limits.local_min)
    least = terms.limits.min_gpus
    if most < least:
        raise InvalidInput(f"needs {_gpus(least)} at once, and could have {most} at the end of this history")
    num_gpus = min(max(wanted, least), most)
    batch = application.fixed.batch_size if application.fixed is not None else limits.initial
    batch = max(batch, num_gpus * limits.local_min)
    return WorkloadJob(spec.id, life.record.submitted_at, spec.id, num_gpus, batch, f"job '{spec.id}'")


def _application(life: _Life, gpu_type: str, queue: Queue | None) -> RecordedApplication:
    model = _model(life)
    if model is None:
        return _by_run_time(life, queue)
    for row in life.rows:
        _read_row(life, row)
    total = _total_progress(life, model, gpu_type)
    work = total
    if life.record.state in (JobState.CANCELLED, JobState.FAILED):
        work = _progress_made(life, total)
    if not work > 0.0:
        raise InvalidInput(f"{life.record.state} before it made any progress")
    initial = model.limits.initial
    speed = model.goodput(1, max(life.record.largest_gpus, 1), gpu_type)
    seconds = life.seconds or (work / speed if speed > 0.0 else 0.0)
    epochs = min(max(int(seconds / _EPOCH_SECONDS), 1), _MOST_EPOCHS)
    fixed = _fixed(life.record, model, gpu_type)
    return RecordedApplication(
        name=life.record.spec.id,
        throughput=model.throughput_on(gpu_type),
        noise=_noise(life, model, work, total),
        limits=model.limits,
        epochs=epochs,
        steps_per_epoch=work / initial / epochs,
        fixed=fixed,
        imbalance=0.0,
        terms=_settled(life.record, queue, None if fixed is None else fixed.num_gpus),
    )


def _model(life: _Life) -> GoodputModel | None:
    """The last reported model; measurements hold newer models than facts, which are significant reports only."""
    found = life.record.goodput
    for row in reversed(life.rows):
        if isinstance(row.get("model"), dict):
            # A damaged measurement counts as missing.
            with contextlib.suppress(PolluxError):
                found = model_from(codec.decode(ModelReport, row["model"]), before=life.record.goodput)
                break
    found = limited(found, life.record.local_batch_max)
    return found if isinstance(found, GoodputModel) else None


def _read_row(life: _Life, row: Mapping[str, Any]) -> None:
    progress, total = row.get("progress"), row.get("total_progress")
    if not isinstance(progress, int | float):
        return
    life.progress = float(progress)
    if isinstance(total, int | float) and total > 0:
        life.total = float(total)
        noise, model = row.get("noise"), row.get("model")
        if isinstance(model, dict) and isinstance(model.get("grad_sqr"), int | float) and model["grad_sqr"] > 0:
            scale = model.get("initial_batch", 0) * model.get("grad_var", 0.0) / model["grad_sqr"]
            life.noise.append((life.total - life.progress, float(scale)))
        elif isinstance(noise, dict) and isinstance(noise.get("scale"), int | float):
            life.noise.append((life.total - life.progress, float(noise["scale"])))


def _total_progress(life: _Life, model: GoodputModel, gpu_type: str) -> float:
    """Useful samples of the whole training: as reported, else work predicted up to the first report, plus the rest."""
    if life.total is not None:
        return life.total
    before = life.stretches
    if life.first_remaining is not None:
        before = life.stretches[: life.stretches_before_first]
    elif life.record.state is not JobState.SUCCEEDED:
        raise InvalidInput("never said how much there is to do, and did not finish")
    done = sum(seconds * model.goodput(nodes, gpus, gpu_type) for seconds, nodes, gpus in before)
    return done + (life.first_remaining or 0.0)


def _progress_made(life: _Life, total: float) -> float:
    if life.progress is not None:
        return min(life.progress, total)
    return total - life.last_remaining if life.last_remaining is not None else 0.0


def _noise(life: _Life, model: GoodputModel, work: float, total: float) -> NoiseTable:
    """φ by share of the training, averaged geometrically over each of a few dozen parts."""
    parts: dict[int, list[tuple[float, float]]] = {}
    for remaining, scale in [*life.noise, (0.0, model.efficiency.noise_scale)]:
        if math.isfinite(scale) and scale > 0.0:
            share = min(max((total - remaining) / work, 0.0), 1.0)
            parts.setdefault(int(share * _MOST_EPOCHS), []).append((share, math.log(scale)))
    points = tuple(
        (statistics.fmean(share for share, _ in part), math.exp(statistics.fmean(log for _, log in part)))
        for _, part in sorted(parts.items())
    )
    # The gradient was always zero, so that every batch has the full efficiency.
    points = points or ((0.0, 1e6 * model.limits.maximum),)
    return NoiseTable(points[0][1], points[-1][1], points=points)


def _is_rigid(limits: JobLimits) -> bool:
    return limits.min_gpus == limits.max_gpus or limits.pinned


def _fixed(record: JobRecord, model: GoodputModel, gpu_type: str) -> FixedConfiguration | None:
    """GPUs and batch of a job that keeps its GPUs; None for elastic ones."""
    limits = record.spec.limits
    if not _is_rigid(limits):
        return None
    num_gpus = min(max(record.largest_gpus or record.spec.requested_gpus, limits.min_gpus), limits.max_gpus)
    most = model.limits.maximum // model.limits.local_min
    if num_gpus > most:
        raise InvalidInput(f"is rigid with {_gpus(num_gpus)}, and the batches of its model suit at most {most}")
    best = model.best_batch(1, num_gpus, gpu_type)[0].total
    return FixedConfiguration(num_gpus, min(max(best, model.limits.initial), model.limits.maximum))


def _settled(record: JobRecord, queue: Queue | None, rigid_gpus: int | None) -> Terms:
    """The limits of its user, without GPU types, CPUs and memory; a rigid job keeps `rigid_gpus`."""
    limits = replace(record.spec.limits, gpu_types=(), mixed_types=False, cpus_per_gpu=0.0, memory_bytes_per_gpu=0.0)
    if rigid_gpus is not None:
        limits = replace(limits, min_gpus=rigid_gpus, max_gpus=rigid_gpus)
    return Terms(limits, record.spec.weight, queue)


def _by_run_time(life: _Life, queue: Queue | None) -> RecordedApplication:
    """A job that never reported a model: it gets the GPUs that it had, for the time that it ran."""
    record, limits = life.record, life.record.spec.limits
    if record.state not in ENDED:
        raise InvalidInput(f"is {record.state} and has reported no model, so nothing says how long it takes")
    if not life.seconds > 0.0:
        raise InvalidInput(_without_work(life))
    had = max(gpus for _, _, gpus in life.stretches)
    num_gpus = min(max(had, limits.min_gpus), limits.max_gpus)
    work_seconds = sum(seconds * gpus for seconds, _, gpus in life.stretches) / num_gpus
    terms = _settled(record, queue, num_gpus if _is_rigid(limits) else None)
    # Its speed on more GPUs is unknown.
    terms = replace(terms, limits=replace(terms.limits, max_gpus=num_gpus))
    epochs = min(max(int(work_seconds / _EPOCH_SECONDS), 1), _MOST_EPOCHS)
    return RecordedApplication(
        name=record.spec.id,
        # A second per step on the GPUs that it had: with fewer it takes longer in proportion.
        throughput=PublishedThroughput(0.0, 1.0 / _UNIT, 0.0, 0.0, 0.0, 0.0, 1.0),
        noise=NoiseSchedule(1.0, 1.0),
        limits=BatchLimits(_UNIT * num_gpus, 2 * _UNIT * num_gpus, 1, 2 * _UNIT * num_gpus, accumulation=False),
        epochs=epochs,
        steps_per_epoch=work_seconds / epochs,
        fixed=FixedConfiguration(num_gpus, _UNIT * num_gpus),
        imbalance=0.0,
        terms=terms,
    )


def _without_work(life: _Life) -> str:
    """Why an ended job has nothing to replay."""
    state = life.record.state
    if not life.lost_seconds:
        return f"{state} without having run"
    return f"{state}: it ran for {life.lost_seconds:.0f} s, but only up to crashes, and such work is not replayed"
