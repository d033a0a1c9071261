"""The GPUs that each job held over time, and the cost of re-allocations; from the logged facts, of limited size.

The engine's thread writes it, any thread reads it. `presenters.timeline` makes the picture of a page.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pollux.controller import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobPaused,
    JobRecord,
    JobRunning,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
)
from pollux.core import NOWHERE, Placement, Reason

__all__ = ["Changes", "Reallocation", "Timeline"]

_MOST_CHANGES = 400_000
_MOST_REALLOCATIONS = 20_000
_MOST_CAPACITIES = 20_000
# Of each job, so that other jobs do not displace the re-allocations of a long one.
_MOST_OF_ONE = 400
# Below this number of jobs, a search for numbers that are no longer used is not worthwhile.
_FEW_JOBS = 10_000


@dataclass(frozen=True, slots=True)
class Reallocation:
    """A change of a job's GPUs: before, after, and why: the policy's code, or how the job lost them.

    Not all count as re-allocations: a start does not, nor does a pause, an end, a crash or a lost node. `cause` is the
    policy's whole reason, if it gave one.
    """

    at: float
    job_id: str
    before: int
    after: int
    reason: str
    cause: Reason | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """A copy of everything, in order of time: from `at` on, job number `who` held `gpus`.

    `jobs` are the ids by number, `names` what people call them; `capacity` the GPUs there were from a time on.
    """

    at: array[float]
    who: array[int]
    gpus: array[int]
    jobs: tuple[str, ...]
    names: Mapping[str, str]
    capacity: tuple[tuple[float, int], ...]
    reallocations: tuple[Reallocation, ...]


@dataclass(slots=True)
class _Job:
    """The GPUs that one job holds now. `generation` equals the controller's; `since` is when a resize began."""

    number: int
    placement: Placement = NOWHERE
    generation: int = 0
    gpus: int = 0
    since: float | None = None
    cost: float = 0.0
    changes: int = 0
    marks: deque[Reallocation] = field(default_factory=lambda: deque(maxlen=_MOST_OF_ONE))


@dataclass(slots=True)
class _Columns:
    at: array[float] = field(default_factory=lambda: array("d"))
    who: array[int] = field(default_factory=lambda: array("l"))
    gpus: array[int] = field(default_factory=lambda: array("l"))

    def add(self, at: float, who: int, gpus: int) -> None:
        self.at.append(at)
        self.who.append(who)
        self.gpus.append(gpus)

    def copy(self) -> tuple[array[float], array[int], array[int]]:
        return self.at[:], self.who[:], self.gpus[:]


class Timeline:
    """The changes of the last weeks: at 400,000, the older half is dropped.

    A job's number is kept while its id is known or a change refers to it; at most as many others wait to be dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._columns = _Columns()
        self._order: list[str] = []
        self._compact_at = _FEW_JOBS
        self._jobs: dict[str, _Job] = {}
        self._names: dict[str, str] = {}
        self._nodes: dict[str, int] = {}
        self._capacity: deque[tuple[float, int]] = deque(maxlen=_MOST_CAPACITIES)
        self._reallocations: deque[Reallocation] = deque(maxlen=_MOST_REALLOCATIONS)
        self._cost = 0.0
        self._changes = 0
        self._handlers: Mapping[type[Event], Callable[..., None]] = {
            JobSubmitted: self._submitted,
            DecisionMade: self._decided,
            JobRunning: self._running,
            GenerationEnded: self._generation_ended,
            GenerationShrunk: self._shrunk,
            JobFinished: self._finished,
            JobCancelled: self._cancelled,
            JobPaused: self._paused,
            NodeAdded: self._node_added,
            NodeRemoved: self._node_removed,
        }

    def add(self, event: Event) -> None:
        """Add a fact."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            with self._lock:
                handler(event)

    def set_placement(self, record: JobRecord) -> None:
        """Correct a job's GPUs by the controller, for changes without a fact of their own, such as time limits."""
        with self._lock:
            job = self._job(record.spec.id)
            job.generation = record.generation
            if job.placement != record.placement:
                if not record.placement:
                    self._mark(record.held_since, record.spec.id, job, str(record.state))
                self._place(job, record.placement, record.held_since)

    def set_nodes(self, nodes: Iterable[tuple[str, int]], at: float) -> None:
        """Set the nodes, for a log whose beginning was trimmed."""
        with self._lock:
            found = dict(nodes)
            if found != self._nodes:
                self._nodes = found
                self._note_capacity(at)

    def forget(self, job_id: str) -> None:
        """Forget a job; its GPU-seconds stay in the sums."""
        with self._lock:
            self._names.pop(job_id, None)
            self._jobs.pop(job_id, None)

    # Reading

    @property
    def reallocation_cost(self) -> float:
        """GPU-seconds in which jobs were paused for re-allocations, over all jobs."""
        return self._cost

    @property
    def num_reallocations(self) -> int:
        """The number of re-allocations of running jobs."""
        return self._changes

    def cost_of(self, job_id: str) -> tuple[float, int]:
        """The GPU-seconds that re-allocations have cost one job, and their number."""
        job = self._jobs.get(job_id)
        return (0.0, 0) if job is None else (job.cost, job.changes)

    def reallocations_of(self, job_id: str) -> list[Reallocation]:
        """The last 400 changes of one job, oldest first."""
        with self._lock:
            job = self._jobs.get(job_id)
            return [] if job is None else list(job.marks)

    def changes(self) -> Changes:
        """A copy of all changes."""
        with self._lock:
            at, who, gpus = self._columns.copy()
            order, names = tuple(self._order), dict(self._names)
            return Changes(at, who, gpus, order, names, tuple(self._capacity), tuple(self._reallocations))

    # Facts

    def _submitted(self, event: JobSubmitted) -> None:
        request = event.spec.request
        self._names[event.spec.id] = event.spec.id if request is None else request.name
        # A forgotten id may be used again by another job.
        self._jobs.pop(event.spec.id, None)
        self._job(event.spec.id)

    def _decided(self, event: DecisionMade) -> None:
        allocation, reasons = event.decision.allocation, event.decision.reasons
        if not event.partial:
            left = [job_id for job_id, job in self._jobs.items() if job.gpus and job_id not in allocation]
            allocation = {**allocation, **dict.fromkeys(left, NOWHERE)}
        for job_id, placement in allocation.items():
            job = self._job(job_id)
            if placement == job.placement:
                continue
            self._note(event.at, job_id, job, placement, reasons.get(job_id))
            if job.placement and placement:
                job.since = event.at
            self._place(job, placement, event.at)

    def _note(self, at: float, job_id: str, job: _Job, placement: Placement, reason: Reason | None) -> None:
        before, after = job.gpus, placement.num_gpus
        self._told(job, Reallocation(at, job_id, before, after, "" if reason is None else reason.code, reason))
        if before:
            self._changes += 1
            job.changes += 1

    def _running(self, event: JobRunning) -> None:
        job = self._job(event.job_id)
        job.generation = max(job.generation, event.generation)
        if job.since is None or event.generation < job.generation:
            return
        seconds = event.at - job.since if event.pause_seconds is None else event.pause_seconds
        cost = max(seconds, 0.0) * job.gpus
        job.since = None
        job.cost += cost
        self._cost += cost

    def _generation_ended(self, event: GenerationEnded) -> None:
        if event.outcome == "succeeded" or event.generation >= self._job(event.job_id).generation:
            self._holds_none(event.job_id, event.at, event.outcome)

    def _shrunk(self, event: GenerationShrunk) -> None:
        job = self._job(event.job_id)
        if event.generation >= job.generation and job.placement:
            self._note(event.at, event.job_id, job, event.placement, Reason("replicas-lost"))
            job.since = event.at
            self._place(job, event.placement, event.at)

    def _finished(self, event: JobFinished) -> None:
        self._holds_none(event.job_id, event.at, event.outcome)

    def _cancelled(self, event: JobCancelled) -> None:
        self._holds_none(event.job_id, event.at, "cancelled")

    def _paused(self, event: JobPaused) -> None:
        self._holds_none(event.job_id, event.at, "paused")

    def _holds_none(self, job_id: str, at: float, why: str) -> None:
        job = self._job(job_id)
        self._mark(at, job_id, job, why)
        self._place(job, NOWHERE, at)

    def _mark(self, at: float, job_id: str, job: _Job, why: str) -> None:
        """Note that a job lost its GPUs without a decision: it is listed with the re-allocations, but not counted."""
        if job.gpus:
            self._told(job, Reallocation(at, job_id, job.gpus, 0, why))

    def _told(self, job: _Job, found: Reallocation) -> None:
        job.marks.append(found)
        self._reallocations.append(found)

    def _node_added(self, event: NodeAdded) -> None:
        self._nodes[event.node.id] = event.node.num_gpus
        self._note_capacity(event.at)

    def _node_removed(self, event: NodeRemoved) -> None:
        self._nodes.pop(event.node_id, None)
        self._note_capacity(event.at)
        for job_id, job in self._jobs.items():
            if job.placement and job.placement.on(event.node_id):
                self._holds_none(job_id, event.at, "node-lost")

    # Columns

    def _job(self, job_id: str) -> _Job:
        job = self._jobs.get(job_id)
        if job is None:
            if len(self._order) >= self._compact_at:
                self._compact()
            job = self._jobs[job_id] = _Job(len(self._order))
            self._order.append(job_id)
        return job

    def _place(self, job: _Job, placement: Placement, at: float) -> None:
        if placement == job.placement:
            return
        job.placement = placement
        job.generation += 1
        if not placement:
            job.since = None
        if placement.num_gpus == job.gpus:
            return
        job.gpus = placement.num_gpus
        # Facts are in order of time; a correction by the controller gets the time of the last one.
        at = max(at, self._columns.at[-1]) if self._columns.at else at
        self._columns.add(at, job.number, job.gpus)
        if len(self._columns.at) > _MOST_CHANGES:
            self._halve()

    def _halve(self) -> None:
        """Drop the older half; the rest begins with what jobs held at that time."""
        old = self._columns
        half = len(old.at) // 2
        cut = old.at[half]
        before: dict[int, int] = {}
        for index in range(half):
            before[old.who[index]] = old.gpus[index]
        new = _Columns()
        for who, gpus in before.items():
            if gpus:
                new.add(cut, who, gpus)
        for mine, theirs in ((new.at, old.at), (new.who, old.who), (new.gpus, old.gpus)):
            mine.extend(theirs[half:])  # type: ignore[arg-type]
        self._columns = new
        self._compact()

    def _compact(self) -> None:
        """Renumber the jobs that are known or that a change refers to, and drop the others."""
        kept = sorted({*self._columns.who, *(job.number for job in self._jobs.values())})
        numbers = {old: new for new, old in enumerate(kept)}
        self._order = [self._order[old] for old in kept]
        self._columns.who = array("l", (numbers[old] for old in self._columns.who))
        for job in self._jobs.values():
            job.number = numbers[job.number]
        self._compact_at = max(2 * len(kept), _FEW_JOBS)

    def _note_capacity(self, at: float) -> None:
        total = sum(self._nodes.values())
        if self._capacity and self._capacity[-1][0] == at:
            self._capacity.pop()
        if not self._capacity or self._capacity[-1][1] != total:
            self._capacity.append((at, total))
