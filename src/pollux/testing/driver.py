"""The smallest driver of a controller: a virtual clock and jobs that progress in proportion to their GPUs.

For tests of policies and of the controller. The simulator models how real jobs progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pollux.controller import (
    Command,
    Controller,
    DecisionMade,
    Event,
    JobFinished,
    JobReported,
    JobRunning,
    ResizeJob,
    StartJob,
    StopJob,
)
from pollux.core import GoodputFunction, Policy

__all__ = ["DriverLog", "FakeDriver", "FakeWork"]


@dataclass(frozen=True, slots=True)
class FakeWork:
    """What a job has to do, in GPU-seconds, how it ends, and the model that it reports once it trains."""

    gpu_seconds: float = 600.0
    outcome: Literal["succeeded", "failed"] = "succeeded"
    goodput: GoodputFunction | None = None


@dataclass(frozen=True, slots=True)
class DriverLog:
    """Every event that the controller applied, and every command that it returned, with its time."""

    events: list[Event] = field(default_factory=list)
    commands: list[tuple[float, Command]] = field(default_factory=list)

    def of(self, *kinds: type[Command]) -> list[Command]:
        """The commands of these kinds, in order."""
        return [command for _, command in self.commands if isinstance(command, kinds)]


@dataclass(slots=True)
class _Replicas:
    generation: int
    num_gpus: int
    ready_at: float
    announced: bool = False


class FakeDriver:
    """Applies a list of events to a controller, asks the policy when a decision is due, and executes the commands.

    A job that was started or resized pauses for its resize cost. `think_seconds` is the time between a snapshot and
    its decision; events go on meanwhile. Jobs without an entry in `work` never end.
    """

    def __init__(
        self,
        controller: Controller,
        policy: Policy,
        events: Iterable[Event],
        work: Mapping[str, FakeWork] | None = None,
        think_seconds: float = 0.0,
    ) -> None:
        self.controller = controller
        self.policy = policy
        self.log = DriverLog()
        self._events = sorted(events, key=lambda event: event.at)
        self._work = dict(work or {})
        self._left = {job_id: work.gpu_seconds for job_id, work in self._work.items()}
        self._replicas: dict[str, _Replicas] = {}
        self._thinking: DecisionMade | None = None
        self._think_seconds = think_seconds

    def run(self, until: float = 100_000.0) -> DriverLog:
        """Run until nothing is left to happen, or until a time; may be called again with a later time."""
        if not self.log.events and self.controller.next_decision_at is None:
            self._note(0.0, self.controller.start(0.0))
        while (now := self._next_moment()) <= until and (self._events or self._unfinished()):
            while self._events and self._events[0].at <= now:
                self._apply(self._events.pop(0))
            self._train(now)
            self._decide(now)
        return self.log

    def _unfinished(self) -> bool:
        return any(record.ended_at is None for record in self.controller.jobs.values())

    def _next_moment(self) -> float:
        moments = [self._events[0].at] if self._events else []
        for job_id, replicas in self._replicas.items():
            moments.append(self._done_at(job_id, replicas) if replicas.announced else replicas.ready_at)
        due = self._thinking.at if self._thinking else self.controller.next_decision_at
        if due is not None:
            moments.append(due)
        return min(moments, default=math.inf)

    def _done_at(self, job_id: str, replicas: _Replicas) -> float:
        return replicas.ready_at + self._left.get(job_id, math.inf) / replicas.num_gpus

    def _train(self, now: float) -> None:
        for job_id, replicas in list(self._replicas.items()):
            if not replicas.announced and replicas.ready_at <= now:
                replicas.announced = True
                self._apply(JobRunning(replicas.ready_at, job_id, replicas.generation))
                model = self._work[job_id].goodput if job_id in self._work else None
                if model is not None:
                    self._apply(JobReported(replicas.ready_at, job_id, model, self._left[job_id]))
            done_at = self._done_at(job_id, replicas)
            if replicas.announced and done_at <= now:
                del self._replicas[job_id]
                self._apply(JobFinished(done_at, job_id, self._work[job_id].outcome))

    def _decide(self, now: float) -> None:
        due = self.controller.next_decision_at
        if self._thinking is None and due is not None and due <= now:
            seen = self.controller.snapshot(now)
            answer = self.policy.allocate(seen)
            self._thinking = DecisionMade(now + self._think_seconds, seen.revision, answer)
        if self._thinking is not None and self._thinking.at <= now:
            event, self._thinking = self._thinking, None
            self._apply(event)

    def _apply(self, event: Event) -> None:
        self.log.events.append(event)
        commands = self.controller.apply(event)
        self._note(event.at, commands)
        for command in commands:
            self._execute(command, event.at)

    def _note(self, at: float, commands: Iterable[Command]) -> None:
        self.log.commands.extend((at, command) for command in commands)

    def _execute(self, command: Command, at: float) -> None:
        if not isinstance(command, StartJob | ResizeJob | StopJob):
            return
        last = self._replicas.pop(command.job_id, None)
        if last is not None and command.job_id in self._left:
            self._left[command.job_id] -= last.num_gpus * max(at - last.ready_at, 0.0)
        if not isinstance(command, StopJob):
            cost = self.controller.jobs[command.job_id].resize_cost_seconds
            self._replicas[command.job_id] = _Replicas(command.generation, command.placement.num_gpus, at + cost)
